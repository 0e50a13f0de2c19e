"""What a real router process does with calls: where they go, what comes back, what is counted."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from functools import partial

import httpx
import pytest
from fault_proxy import Answer, Close, FaultProxy, Reset
from router_rig import DEADLINE_S, RouterProcess, StubEngine, router_process, table, token

from activities.wire.contract import (
    NO_HEALTHY_WORKERS,
    QUEUE_FULL,
    WAITING_TIMEOUT,
    WORKER_UNAVAILABLE,
)
from activities.wire.faults import classify_status
from activities.wire.router_contract import GROUP_HEADER
from models.routing import EngineState, RouterState, RoutingTable

EPOCHS = itertools.count(1)


@pytest.fixture(scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterProcess]:
    options = ("--max-queued-requests", "2", "--queue-timeout-s", "0.4")
    async with router_process(tmp_path_factory.mktemp("router"), *options) as process:
        yield process


@pytest.fixture
async def http(router: RouterProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=router.url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
async def pair() -> AsyncIterator[tuple[StubEngine, StubEngine]]:
    async with StubEngine("engine-0") as first, StubEngine("engine-1") as second:
        yield first, second


async def route_to(router: RouterProcess, routing: RoutingTable) -> None:
    await router.control.set_table(token(next(EPOCHS)), routing)


def idle(state: RouterState) -> bool:
    owed = [each.active_calls + each.reserved_calls for each in state.engines]
    return not any(owed) and not state.active_calls and not state.waiting_calls


def active(count: int, state: RouterState) -> bool:
    return state.active_calls == count


def group(name: str, expected: int, answered: int = 0) -> dict[str, str]:
    return {GROUP_HEADER: f"{name};{answered};{expected}"}


async def failure(answer: httpx.Response) -> tuple[int, str, str | None]:
    category = classify_status("POST", "/generate", answer.status_code, answer.content)
    return answer.status_code, answer.json()["detail"], category


async def test_bodies_and_statuses_pass_untouched(router, http, pair):
    engine = pair[0]
    await route_to(router, table(engine))
    sent = b'{"rid" :"a",\n "text": "\xc3\xa9",   "x":1e-3}'
    answer = await http.post("/generate", content=sent)
    assert engine.bodies == [sent]
    assert answer.content == b'{"engine": "engine-0",  "echo": ' + sent + b"}"
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    engine.status = 500
    answer = await http.post("/generate", content=sent)
    assert (answer.status_code, answer.content[:9]) == (500, b'{"engine"')
    large = b'{"input_ids": [' + b",".join([b"123456"] * 300_000) + b"]}"
    engine.status = 200
    answer = await http.post("/generate", content=large)
    assert len(answer.content) == len(large) + len(b'{"engine": "engine-0",  "echo": }')
    assert idle(await router.control.state())


async def test_a_chunked_answer_arrives_whole(router, http):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: a/b\r\n\r\n")
        for piece in (b"data: 1\n\n", b"data: [DONE]\n\n"):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await route_to(router, table(StubEngine("engine-0").routed(url=url)))
    answer = await http.post("/generate", content=b"{}")
    assert answer.content == b"data: 1\n\ndata: [DONE]\n\n"
    assert answer.headers["content-type"] == "a/b"
    server.close()


async def test_siblings_go_to_one_engine_and_groups_to_the_least_reserved(router, http, pair):
    first, second = pair
    for engine in pair:
        engine.go.clear()
    await route_to(router, table(*pair))
    calls = [asyncio.create_task(http.post("/generate", headers=group("big", 8))) for _ in range(2)]
    await router.until(lambda state: state.active_calls == 2)
    # Two calls of eight are sent: six more are reserved, so small groups go elsewhere.
    for count, name in ((4, "a"), (6, "b"), (8, "c")):
        header = group(name, 2)
        calls += [asyncio.create_task(http.post("/generate", headers=header)) for _ in range(2)]
        await router.until(partial(active, count))
    state = await router.control.state()
    assert [each.reserved_calls for each in state.engines] == [8, 6]
    assert (len(first.bodies), len(second.bodies)) == (2, 6)
    for engine in pair:
        engine.go.set()
    names = [json.loads((await call).content)["engine"] for call in calls]
    assert names == ["engine-0"] * 2 + ["engine-1"] * 6
    for done in range(2, 8):
        answer = await http.post("/generate", headers=group("big", 8, done))
        assert answer.json()["engine"] == "engine-0"
    assert idle(await router.control.state())


async def test_a_call_that_is_sent_again_belongs_to_its_group(router, http, pair):
    """Handed back at a publication, a call's rest is another call that its sender expects."""
    await route_to(router, table(*pair))
    for answered, expected in ((0, 2), (1, 3), (2, 3)):
        assert (await http.post("/generate", headers=group("g", expected, answered))).is_success
    assert idle(await router.control.state())
    # All calls of a group answered and then sent again: it is taken up where its sender is.
    for answered, expected in ((0, 1), (1, 2)):
        assert (await http.post("/generate", headers=group("h", expected, answered))).is_success
    assert idle(await router.control.state())


async def test_counters_return_to_zero_after_every_kind_of_failure(router, http, pair):
    engine = pair[0]
    async with FaultProxy(engine.url) as proxy:
        await route_to(router, table(engine.routed(url=proxy.url)))
        for fault in (Close(), Reset(), Answer(500, b"x"), Answer(503, {"message": QUEUE_FULL})):
            proxy.fail_next(fault)
            answer = await http.post("/generate", headers=group(f"{fault}"[:5], 4))
            assert answer.status_code in (500, 503)
        assert (await router.control.state()).active_calls == 0
        released = {"groups": ["Close", "Reset", "Answe", "unknown"]}
        assert (await http.post("/router/release", json=released)).status_code == 200
    await router.until(idle)


async def test_a_lost_connection_is_named_and_another_engine_is_tried_first(router, http, pair):
    first, second = pair
    async with FaultProxy(first.url) as proxy:
        await route_to(router, table(first.routed(url=proxy.url), second))
        proxy.fail_next(Close())
        lost = await http.post("/generate", headers=group("g", 1))
        assert await failure(lost) == (503, WORKER_UNAVAILABLE, "transport")
        assert proxy.count("/generate") == 1  # never a second try
        await http.post("/router/release", json={"groups": ["g"]})
        for number in range(3):
            answer = await http.post("/generate", headers=group(f"next-{number}", 1))
            assert answer.json()["engine"] == "engine-1"
    await router.until(idle)


async def test_a_client_that_hangs_up_ends_its_call_and_its_group(router, http, pair):
    engine = pair[0]
    engine.go.clear()
    await route_to(router, table(engine))
    call = asyncio.create_task(http.post("/generate", headers=group("g", 8)))
    state = await router.until(lambda state: state.active_calls == 1)
    assert state.engines[0].reserved_calls == 8
    call.cancel()
    await router.until(idle)
    async with asyncio.timeout(DEADLINE_S):
        while not engine.hung_up:
            await asyncio.sleep(0.01)
    assert engine.active == 0


async def test_only_a_committed_version_and_digest_is_routable(router, http, pair):
    first, second = pair
    await route_to(router, table(first.routed(digest="other"), second))
    for number in range(4):
        answer = await http.post("/generate", headers=group(str(number), 1))
        assert answer.json()["engine"] == "engine-1"
    state = await router.control.state()
    assert [each.routable for each in state.engines] == [False, True]
    await route_to(router, table(first.routed(version=1), second.routed(version=1)))
    refused = await http.post("/generate")
    assert await failure(refused) == (503, WAITING_TIMEOUT, "timeout")
    await router.until(idle)


async def test_a_full_queue_and_a_wait_that_is_too_long(router, http, pair):
    engine = pair[0]
    updating = engine.routed(state=EngineState.UPDATING)
    await route_to(router, table(updating))
    waiting = [asyncio.create_task(http.post("/generate")) for _ in range(2)]
    await router.until(lambda state: state.waiting_calls == 2)
    assert await failure(await http.post("/generate")) == (503, QUEUE_FULL, "overload")
    for call in waiting:
        assert await failure(await call) == (503, WAITING_TIMEOUT, "timeout")
    # A wait ends as soon as an engine is there, and is forgotten when its client leaves.
    served = asyncio.create_task(http.post("/generate"))
    left = asyncio.create_task(http.post("/generate"))
    await router.until(lambda state: state.waiting_calls == 2)
    left.cancel()
    await router.until(lambda state: state.waiting_calls == 1)
    await route_to(router, table(engine))
    assert (await served).json()["engine"] == "engine-0"
    await router.until(idle)


async def test_no_engine_at_all_is_told_at_once(router, http, pair):
    await route_to(router, table())
    assert await failure(await http.post("/generate")) == (503, NO_HEALTHY_WORKERS, "unavailable")
    given_up = pair[0].routed(state=EngineState.UNAVAILABLE)
    await route_to(router, table(given_up))
    assert await failure(await http.post("/generate")) == (503, NO_HEALTHY_WORKERS, "unavailable")
    # Asking again registers nothing.
    assert [each.routable for each in (await router.control.state()).engines] == [False]


async def test_an_engine_that_leaves_the_table_ends_its_calls(router, http, pair):
    first, second = pair
    first.go.clear()
    await route_to(router, table(first))
    call = asyncio.create_task(http.post("/generate", headers=group("g", 2)))
    await router.until(lambda state: state.active_calls == 1)
    await route_to(router, table(second))
    assert await failure(await call) == (503, WORKER_UNAVAILABLE, "transport")
    answer = await http.post("/generate", headers=group("g", 2))
    assert answer.json()["engine"] == "engine-1"
    await http.post("/router/release", json={"groups": ["g"]})
    await router.until(idle)


async def test_aborts_reach_every_engine_and_name_the_deaf_ones(router, http, pair):
    first, second = pair
    await route_to(router, table(first, second))
    answer = await http.post("/abort_request", json={"abort_all": True})
    assert answer.json() == {"not_reached": []}
    assert [json.loads(body) for each in pair for body in each.aborts] == [{"abort_all": True}] * 2
    await second.close()
    answer = await http.post("/abort_request", json={"rid": "a"})
    assert (answer.status_code, answer.json()) == (200, {"not_reached": ["engine-1"]})


async def test_gauges_and_unknown_routes(router, http, pair):
    await route_to(router, table(*pair))
    assert (await http.get("/health")).status_code == 200
    text = (await http.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values["perdure_router_active_calls"] == "0"
    assert values['perdure_router_engine_routable{engine="engine-1"}'] == "1"
    assert {key for key in values if "faults_total" in key} == {
        f'perdure_router_faults_total{{kind="{kind}"}}'
        for kind in ("transport", "unavailable", "queue_full", "waiting_timeout")
    }
    for method, path in (("GET", "/generate"), ("POST", "/update_weights_from_disk")):
        answer = await http.request(method, path)
        assert answer.status_code == 404
    assert (await http.put("/router/table", json={"engines": []})).status_code == 400
