"""Where a worker answers ``/metrics``: two variables of its environment, both optional."""

import os
from collections.abc import Mapping

from models.errors import ConfigurationError

WORKER_METRICS = "PERDURE_METRICS_ADDRESS"
"""``host:port`` of the worker's own metrics, those of Temporal's SDK."""
RUN_METRICS = "PERDURE_RUN_METRICS_ADDRESS"
"""``host:port`` of the newest metrics of the runs that a GPU worker serves."""


def metrics_address(variable: str, environment: Mapping[str, str] | None = None) -> str | None:
    """What ``variable`` says; None when it is unset or empty.

    Raises:
        ConfigurationError: it is no ``host:port``.
    """
    value = (os.environ if environment is None else environment).get(variable, "")
    host, _, port = value.rpartition(":")
    if value and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigurationError(
            f"{variable} is {value!r}; set it to host:port, for example 127.0.0.1:9464"
        )
    return value or None
