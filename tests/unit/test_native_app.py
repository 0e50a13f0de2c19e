"""The engine's ASGI application without a model."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from workers.engines.native.app import build_app
from workers.engines.native.control import Control
from workers.engines.native.gate import Gate
from workers.engines.native.generation import Generation


@pytest.mark.parametrize("path", ["/generate", "/abort_request"])
async def test_a_client_that_hangs_up_while_sending_is_no_error(path: str) -> None:
    loop = asyncio.get_running_loop()
    model: Any = SimpleNamespace(loaded=loop.create_future(), ended=loop.create_future())
    model.loaded.set_result(None)
    nothing: Any = None
    generation = Generation(nothing, Gate())
    control = Control(nothing, nothing, 0, model, Gate(), generation)
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await build_app(generation, control, model)(scope, receive, send)
    assert statuses == [499]
    assert generation.num_requests == 0
