"""The router's ASGI application: bodies pass through it untouched, in both directions."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from pydantic import ValidationError

from activities.wire.contract import ABORT_REQUEST, GENERATE, HEALTH, METRICS
from activities.wire.router_contract import (
    GROUP_HEADER,
    ROUTER_DRAIN,
    ROUTER_RELEASE,
    ROUTER_STATE,
    ROUTER_TABLE,
    STALE,
    STILL_OWES,
    DrainOrder,
    GroupTag,
    ReleaseOrder,
    TableOrder,
)
from models.errors import ConfigurationError, ContractViolation, ServiceUnreachable, StaleFence
from models.routing import EngineState
from workers.engines.router.balancer import Balancer, Refusal
from workers.engines.router.gauges import CONTENT_TYPE, metrics_text
from workers.engines.router.table import Table
from workers.engines.router.target import Target
from workers.engines.router.upstream import Answer, UpstreamLost

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = b"application/json"
ABORT_TIMEOUT_S = 5.0
_GROUP = GROUP_HEADER.encode()

logger = logging.getLogger(__name__)


class _HungUp(Exception):
    """The client closed the connection; nobody reads an answer."""


class RouterApp:
    """ASGI 3 callable, HTTP only."""

    def __init__(self, table: Table, balancer: Balancer) -> None:
        self._table = table
        self._balancer = balancer
        self._routes: dict[tuple[str, str], Callable[[bytes], Awaitable[Answer]]] = {
            ("POST", ABORT_REQUEST): self._abort,
            ("GET", HEALTH): self._health,
            ("GET", METRICS): self._metrics,
            ("GET", ROUTER_STATE): self._state,
            ("PUT", ROUTER_TABLE): self._set_table,
            ("POST", ROUTER_DRAIN): self._drain,
            ("POST", ROUTER_RELEASE): self._release,
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        method, path = scope["method"], scope["path"]
        try:
            body = await _body(receive)
            if path == GENERATE and method == "POST":
                call = self._generate(_tag(scope["headers"]), body)
            elif (route := self._routes.get((method, path))) is not None:
                call = self._control(route, body)
            else:
                call = _unknown(method, path)
            answer = await _while_connected(call, receive)
        except _HungUp:
            return
        headers = [
            (b"content-type", answer.content_type),
            (b"content-length", b"%d" % len(answer.body)),
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _generate(self, tag: GroupTag | None, body: bytes) -> Answer:
        try:
            return await self._balancer.call(tag, GENERATE.encode(), body)
        except Refusal as refusal:
            return _detail(503, refusal.detail)

    async def _control(self, route: Callable[[bytes], Awaitable[Answer]], body: bytes) -> Answer:
        try:
            return await route(body)
        except StaleFence as error:
            return _detail(STALE, error.message)
        except ServiceUnreachable as error:
            return _detail(STILL_OWES, error.message)
        except ContractViolation as error:
            return _detail(404, error.message)
        except (ConfigurationError, ValidationError) as error:
            return _detail(400, str(error))

    async def _set_table(self, body: bytes) -> Answer:
        order = TableOrder.model_validate_json(body)
        self._table.set(order.token, order.table)
        return _ok()

    async def _drain(self, body: bytes) -> Answer:
        order = DrainOrder.model_validate_json(body)
        await self._table.drain(order.token, order.engine, order.timeout_s)
        return _ok()

    async def _release(self, body: bytes) -> Answer:
        self._table.groups.release(ReleaseOrder.model_validate_json(body).groups)
        return _ok()

    async def _state(self, _: bytes) -> Answer:
        return Answer(200, JSON, self._balancer.state().model_dump_json().encode())

    async def _health(self, _: bytes) -> Answer:
        return Answer(503 if self._balancer.stopping else 200, JSON, b"")

    async def _metrics(self, _: bytes) -> Answer:
        text = metrics_text(self._balancer.state(), self._balancer.faults, len(self._table.groups))
        return Answer(200, CONTENT_TYPE, text.encode())

    async def _abort(self, body: bytes) -> Answer:
        """Broadcast to every engine in use. 200 also when one did not hear: it is named."""

        async def tell(target: Target) -> str | None:
            try:
                async with asyncio.timeout(ABORT_TIMEOUT_S):
                    answer = await target.upstream.call(b"POST", ABORT_REQUEST.encode(), body)
            except (TimeoutError, UpstreamLost) as error:
                reason = str(error) or f"no answer within {ABORT_TIMEOUT_S:g} s"
            else:
                if answer.status == 200:
                    return None
                reason = f"answered {answer.status}"
            logger.warning("%s: requests not aborted: %s", target.engine.name, reason)
            return target.engine.name

        used = [each for each in self._table.targets if each.state is not EngineState.UNAVAILABLE]
        deaf = [name for name in await asyncio.gather(*map(tell, used)) if name is not None]
        return Answer(200, JSON, json.dumps({"not_reached": deaf}).encode())


async def _unknown(method: str, path: str) -> Answer:
    return _detail(404, f"the router has no {method} {path}")


async def _while_connected(call: Awaitable[Answer], receive: Receive) -> Answer:
    """The result of ``call``, which is cancelled when the client hangs up; ``_HungUp`` then."""
    task = asyncio.current_task()
    assert task is not None
    over = False

    def hung_up(_: asyncio.Future[None]) -> None:
        if not over:
            task.cancel()

    listening = asyncio.ensure_future(_disconnected(receive))
    listening.add_done_callback(hung_up)
    try:
        return await call
    except asyncio.CancelledError:
        if not listening.done() or listening.cancelled():
            raise
        task.uncancel()
        raise _HungUp from None
    finally:
        over = True
        listening.cancel()


async def _disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(receive: Receive) -> bytes:
    """The whole body; ``_HungUp`` when the client leaves before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _HungUp
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _tag(headers: list[tuple[bytes, bytes]]) -> GroupTag | None:
    for name, value in headers:
        if name == _GROUP:
            return GroupTag.parse(value.decode("latin-1"))
    return None


def _ok() -> Answer:
    return Answer(200, JSON, b"{}")


def _detail(status: int, text: str) -> Answer:
    return Answer(status, JSON, json.dumps({"detail": text}).encode())
