"""The race between a server that closes an idle connection and a client that reuses it.

With equal windows the server's ends first, by the time that its closing takes to arrive, and a call
that is sent in between is lost. A slow link makes that time long enough to send one at will.
"""

import asyncio
import contextlib
from pathlib import Path

from fault_proxy import LatentLink
from router_rig import StubEngine, engine_client, router_process, table, token

from activities.wire.contract import GenerateRequest
from activities.wire.faults import TRANSPORT
from activities.wire.lanes import KEEPALIVE_EXPIRY_S, LaneTransport
from models.errors import GenerationFault
from workers.engines.router.options import RouterOptions

LATENCY_S = 0.4
CLIENT_WINDOW_S = 0.8
ROUNDS = 2


async def lost_calls(folder: Path, server_window_s: float) -> tuple[int, int]:
    """Calls lost on a connection that the client takes to be alive, and connections used."""
    lost = 0
    async with (
        StubEngine("engine-0") as engine,
        router_process(folder, "--keep-alive-s", str(server_window_s)) as router,
        LatentLink(router.url, LATENCY_S) as link,
        contextlib.aclosing(
            engine_client(link.url, transport=LaneTransport(CLIENT_WINDOW_S))
        ) as client,
    ):
        await router.control.set_table(token(), table(engine))
        for _ in range(ROUNDS):
            await client.generate(GenerateRequest(rid="a" * 32, input_ids=[1]), timeout_s=20)
            # The server's window is over now; its closing is on the way for LATENCY_S.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(link.closing.wait(), CLIENT_WINDOW_S - LATENCY_S + 0.1)
            try:
                await client.generate(GenerateRequest(rid="b" * 32, input_ids=[1]), timeout_s=20)
            except GenerationFault as fault:
                lost += fault.category == TRANSPORT
        return lost, link.connections


async def test_equal_windows_lose_calls(tmp_path: Path) -> None:
    assert await lost_calls(tmp_path, CLIENT_WINDOW_S) == (ROUNDS, ROUNDS)


async def test_a_server_that_waits_longer_than_its_clients_loses_none(tmp_path: Path) -> None:
    assert await lost_calls(tmp_path, 12 * CLIENT_WINDOW_S) == (0, 1)


def test_the_windows_are_those_of_the_second_case() -> None:
    assert RouterOptions().keep_alive_s == 60 == 12 * KEEPALIVE_EXPIRY_S
