"""The newest metrics of runs for Prometheus, from an endpoint of the GPU worker."""

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from models.errors import ConfigurationError
from models.ids import RunRef
from models.metrics import METRICS
from workers.tracking.background import BackgroundTracker

_MEANINGS = {metric.name: metric.meaning for metric in METRICS}


class PrometheusSink(BackgroundTracker):
    """Each metric as a gauge ``perdure_<name>``, label ``run``; kept until the process ends."""

    def __init__(self, address: str) -> None:
        """Serve ``/metrics`` at ``address`` (``host:port``) from now on.

        Raises:
            ConfigurationError: the address cannot be had.
        """
        super().__init__("prometheus")
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        host, _, port = address.rpartition(":")
        try:
            self._server, self._thread_of_server = start_http_server(
                int(port), host, self._registry
            )
        except OSError as error:
            raise ConfigurationError(
                f"the metrics of runs cannot be served at {address}: {error}"
            ) from error

    def _record(self, run: RunRef, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._gauge(name).labels(run=run.run_id).set(value)

    def _finish(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread_of_server.join()

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(
                gauge_name(name), _MEANINGS.get(name, name), ["run"], registry=self._registry
            )
        return self._gauges[name]


def gauge_name(name: str) -> str:
    """``train/grad_norm`` as Prometheus spells it: ``perdure_train_grad_norm``."""
    return "perdure_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
