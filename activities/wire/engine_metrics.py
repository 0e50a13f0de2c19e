"""An engine's own gauges, from its Prometheus text: how busy it is, as it says itself.

Format: https://prometheus.io/docs/instrumenting/exposition_formats (text, version 0.0.4).
"""

import asyncio
import math
import re

import httpx

from activities.wire.contract import METRICS
from activities.wire.lanes import LaneTransport
from models.base import Frozen
from models.errors import ContractViolation, ServiceUnreachable

PREFIX = "sglang:"
KEPT = frozenset(
    {
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "full_token_usage",
        "mamba_usage",
        "gen_throughput",
        "cache_hit_rate",
        "utilization",
        "fwd_occupancy",
    }
)
"""Names that are kept, without their prefix. An engine serves those that it knows."""

_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?"
    r"[ \t]+(?P<value>[^\s{}]+)(?:[ \t]+-?\d+)?[ \t]*"
)
_LABEL = re.compile(r'\s*(?P<name>[a-zA-Z_]\w*)\s*=\s*"(?P<value>(?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class EngineSeries(Frozen):
    """One series of one moment. Series that differ in labels are never added up."""

    name: str
    labels: dict[str, str]
    value: float | None
    """None for what is not a finite number: unknown, which is not 0."""


class EngineMetricsClient:
    """Reads ``/metrics`` of any number of engines."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._http = httpx.AsyncClient(
            transport=transport or LaneTransport(),
            timeout=None,  # every call brings its own deadline
            trust_env=False,
            # Observations are as far apart as servers keep connections open: none is kept.
            headers={"connection": "close"},
        )

    async def series(self, url: str, *, timeout_s: float) -> list[EngineSeries]:
        """The kept series of the engine at ``url``, in the order that it tells them.

        Raises:
            ServiceUnreachable: no answer within ``timeout_s`` seconds.
            ContractViolation: the answer is no list of metrics.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._http.get(url.rstrip("/") + METRICS)
        except (TimeoutError, httpx.TransportError) as error:
            reason = str(error) or type(error).__name__
            raise ServiceUnreachable(
                f"{url}: GET {METRICS} had no answer within {timeout_s:g} s: {reason}"
            ) from error
        if answer.status_code != 200:
            raise ContractViolation(f"{url}: GET {METRICS} answered {answer.status_code}")
        return kept_series(answer.text)

    async def aclose(self) -> None:
        """Close open connections."""
        await self._http.aclose()


def kept_series(text: str) -> list[EngineSeries]:
    """The kept series of a Prometheus text.

    Raises:
        ContractViolation: a line of a kept series cannot be read.
    """
    lines = (line for line in text.splitlines() if line.startswith(PREFIX))
    return [_series(line) for line in lines if _name(line) in KEPT]


def _name(line: str) -> str:
    return re.split(r"[{\s]", line.removeprefix(PREFIX), maxsplit=1)[0]


def _series(line: str) -> EngineSeries:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ContractViolation(f"a metric cannot be read: {line[:200]!r}")
    try:
        value = float(match["value"])
    except ValueError:
        raise ContractViolation(f"the value of a metric is no number: {line[:200]!r}") from None
    return EngineSeries(
        name=match["name"].removeprefix(PREFIX),
        labels=_labels(match["labels"] or "", line),
        value=value if math.isfinite(value) else None,
    )


def _labels(text: str, line: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            raise ContractViolation(f"the labels of a metric cannot be read: {line[:200]!r}")
        labels[match["name"]] = re.sub(
            r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), match["value"]
        )
        position = match.end()
    return labels
