"""The control client of the router: which engines it routes to. One call is one request."""

import asyncio
from typing import Any

import httpx
from pydantic import ValidationError

from activities.multiplier import infra_timeout_multiplier
from activities.slow_waits import http_operation, told_while_slow
from activities.wire.faults import LOGGED_BODY_CHARS
from activities.wire.lanes import LaneTransport
from activities.wire.router_contract import (
    ROUTER_DRAIN,
    ROUTER_STATE,
    ROUTER_TABLE,
    STALE,
    STILL_OWES,
    DrainOrder,
    TableOrder,
)
from activities.wire.token import bearer, engine_token
from models.base import Frozen
from models.errors import ContractViolation, ServiceUnreachable, StaleFence
from models.ids import FenceToken
from models.routing import RouterState, RoutingTable

CONTROL_TIMEOUT_S = 10.0
"""The router answers from memory."""


class RouterClient:
    """Implements ``activities.site.RouterControl``.

    Every call has a deadline, longer by ``PERDURE_INFRA_TIMEOUT_MULTIPLIER``, and raises:

        ServiceUnreachable: no answer within the deadline.
        StaleFence: the token is smaller than one that the router saw.
        ContractViolation: the router refused the call for another reason.
    """

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            transport=transport or LaneTransport(),
            timeout=None,  # every call brings its own deadline
            trust_env=False,  # a proxy from the environment must not see control traffic
            headers=bearer(engine_token()),
        )

    async def set_table(self, token: FenceToken, table: RoutingTable) -> None:
        """Route by exactly this table from now on."""
        await self._call("PUT", ROUTER_TABLE, TableOrder(token=token, table=table))

    async def drain(self, token: FenceToken, engine: str, timeout_s: float) -> None:
        """Give ``engine`` no new group; return when it owes no call of the groups it has.

        It is given none until the next table says so. ``timeout_s`` is in seconds, before the
        multiplier; an engine that still owes calls then is a ``ServiceUnreachable``.
        """
        limit_s = timeout_s * infra_timeout_multiplier()
        order = DrainOrder(token=token, engine=engine, timeout_s=limit_s)
        await self._call("POST", ROUTER_DRAIN, order, extra_s=limit_s)

    async def state(self) -> RouterState:
        """Every engine as the router sees it."""
        answer = await self._call("GET", ROUTER_STATE)
        try:
            return RouterState.model_validate_json(answer.content)
        except ValidationError as error:
            raise ContractViolation(
                f"{self.url}: GET {ROUTER_STATE} answered no state: {_excerpt(answer)!r}"
            ) from error

    async def aclose(self) -> None:
        """Close the pooled connections."""
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, order: Frozen | None = None, *, extra_s: float = 0.0
    ) -> httpx.Response:
        timeout_s = CONTROL_TIMEOUT_S * infra_timeout_multiplier() + extra_s
        sent: dict[str, Any] = {}
        if order is not None:
            sent = {
                "content": order.model_dump_json(),
                "headers": {"content-type": "application/json"},
            }
        try:
            with told_while_slow(http_operation(method, self.url, path), timeout_s):
                async with asyncio.timeout(timeout_s):
                    answer = await self._http.request(method, path, **sent)
        except (TimeoutError, httpx.TransportError) as error:
            reason = str(error) or type(error).__name__
            raise ServiceUnreachable(
                f"router at {self.url}: {method} {path} had no answer within {timeout_s:g} s: "
                f"{reason}"
            ) from error
        if answer.status_code == 200:
            return answer
        if answer.status_code == STALE:
            raise StaleFence(_detail(answer))
        message = f"router at {self.url}: {method} {path} answered {answer.status_code}: "
        if answer.status_code == STILL_OWES:
            raise ServiceUnreachable(message + _detail(answer))
        raise ContractViolation(message + _excerpt(answer))


def _detail(answer: httpx.Response) -> str:
    """The ``detail`` text of an answer, else the start of its body."""
    try:
        body = answer.json()
    except ValueError:
        return _excerpt(answer)
    return str(body["detail"]) if isinstance(body, dict) and "detail" in body else _excerpt(answer)


def _excerpt(answer: httpx.Response) -> str:
    return answer.text[:LOGGED_BODY_CHARS]
