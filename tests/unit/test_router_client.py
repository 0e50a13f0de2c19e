"""The router's control client: what it raises for which answer, and the command of its process."""

import asyncio
import json

import httpx
import pytest

from activities.wire.router_client import RouterClient
from models.errors import ContractViolation, ServiceUnreachable, StaleFence
from models.ids import FenceToken
from models.routing import RouterState, RoutingTable

TOKEN = FenceToken(epoch=2, update=3, attempt=1)


def client(status: int, body: object) -> RouterClient:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=json.dumps(body).encode())

    return RouterClient("http://router:1", transport=httpx.MockTransport(handle))


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (409, {"detail": "router: a refused, b owns it"}, StaleFence, "^router: a refused, b owns"),
        (504, {"detail": "engine-0 still owes 1"}, ServiceUnreachable, "504: engine-0 still owes"),
        (404, {"detail": "no engine 'x'"}, ContractViolation, "POST /router/drain answered 404"),
        (500, "broken", ContractViolation, "answered 500"),
        (409, ["?"], StaleFence, r"\["),
    ],
)
async def test_refusals(status, body, error, text):
    with pytest.raises(error, match=text):
        await client(status, body).drain(TOKEN, "x", 1.0)


async def test_a_state_that_is_none_is_a_violation():
    with pytest.raises(ContractViolation, match="answered no state"):
        await client(200, {"engines": 3}).state()
    empty = RouterState(engines=(), active_calls=0, waiting_calls=0)
    assert await client(200, empty.model_dump()).state() == empty


async def test_nobody_listens(unused_tcp_port: int):
    control = RouterClient(f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(ServiceUnreachable, match="PUT /router/table had no answer within 10 s"):
        await control.set_table(TOKEN, RoutingTable())
    await control.aclose()


async def test_a_drain_is_waited_for_beyond_its_own_limit(monkeypatch: pytest.MonkeyPatch):
    """Both limits grow with the infrastructure multiplier; the router's own ends first."""
    limits, real = [], asyncio.timeout

    def limited(seconds: float) -> asyncio.Timeout:
        limits.append(seconds)
        return real(seconds)

    asked = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(200)

    monkeypatch.setenv("PERDURE_INFRA_TIMEOUT_MULTIPLIER", "3")
    monkeypatch.setattr(asyncio, "timeout", limited)
    control = RouterClient("http://router:1", transport=httpx.MockTransport(handle))
    await control.drain(TOKEN, "engine-1", 20.0)
    assert limits == [90.0]
    assert asked == [
        {
            "token": {"epoch": 2, "update": 3, "attempt": 1},
            "engine": "engine-1",
            "timeout_s": 60.0,
        }
    ]
