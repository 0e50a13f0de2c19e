"""Rows of ``engine_occupancy_*.jsonl``: the gauges of every engine that the router knows."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from activities.site import RouterControl
from activities.storage import layout
from activities.wire.engine_metrics import EngineMetricsClient
from activities.wire.router_client import RouterClient
from models.errors import PerdureError, ServiceUnreachable

LIMIT_S = 2.0
"""For one answer of the router or an engine: an observation must never pile up on the next."""
ERROR_CHARS = 512


class EngineRow(NamedTuple):
    """A row and the file that it belongs to."""

    rel: str
    row: dict[str, Any]


class EngineOccupancy:
    """Finds engines through the router and asks each for its gauges."""

    def __init__(
        self,
        router_url: Callable[[], str | None],
        *,
        connect: Callable[[str], RouterControl] = RouterClient,
        client: EngineMetricsClient | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        """``router_url`` is None while no router is known; the rest are seams for tests."""
        self._router_url = router_url
        self._connect = connect
        self._client = client or EngineMetricsClient()
        self._limit_s = limit_s

    async def rows(self) -> list[EngineRow]:
        """One row an engine, with its series or the error; or one that says who was not found."""
        try:
            urls = await self._engines()
        except PerdureError as error:
            row = {"time_unix": time.time(), "discovery_error": _said(error)}
            return [EngineRow(layout.ENGINE_OCCUPANCY, row)]
        return list(await asyncio.gather(*map(self._row, urls)))

    async def aclose(self) -> None:
        """Close open connections."""
        await self._client.aclose()

    async def _engines(self) -> list[str]:
        url = self._router_url()
        if url is None:
            raise ServiceUnreachable("no router is known yet")
        router = self._connect(url)
        try:
            async with asyncio.timeout(self._limit_s):
                state = await router.state()
        except TimeoutError as error:
            raise ServiceUnreachable(
                f"{url}: the router did not tell its state within {self._limit_s:g} s"
            ) from error
        finally:
            await router.aclose()
        return [each.engine.url for each in state.engines]

    async def _row(self, url: str) -> EngineRow:
        row: dict[str, Any] = {"engine": url}
        try:
            series = await self._client.series(url, timeout_s=self._limit_s)
            row["series"] = [each.model_dump() for each in series]
        except PerdureError as error:
            row["error"] = _said(error)
        return EngineRow(layout.engine_occupancy(url), {"time_unix": time.time(), **row})


def _said(error: PerdureError) -> str:
    return f"{type(error).__name__}: {str(error)[:ERROR_CHARS]}"
