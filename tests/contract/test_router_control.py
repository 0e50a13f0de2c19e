"""The router's control side: fences, drains, health, and the end of the process."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator

import httpx
import pytest
from fault_proxy import FaultProxy, Hang
from router_rig import DEADLINE_S, RouterProcess, StubEngine, router_process, table, token

from activities.wire.contract import NO_HEALTHY_WORKERS, WORKER_UNAVAILABLE
from activities.wire.router_contract import GROUP_HEADER
from models.errors import ContractViolation, ServiceUnreachable, StaleFence
from models.routing import EngineState

EPOCHS = itertools.count(1)
HEALTH_INTERVAL_S = 0.1


@pytest.fixture(scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterProcess]:
    options = (
        *("--health-interval-s", str(HEALTH_INTERVAL_S), "--health-timeout-s", "0.3"),
        *("--group-expiry-s", "1", "--queue-timeout-s", "10"),
    )
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


def group(name: str, expected: int, answered: int = 0) -> dict[str, str]:
    return {GROUP_HEADER: f"{name};{answered};{expected}"}


@pytest.mark.parametrize(("epochs", "update", "attempt"), [(-1, 9, 9), (0, 6, 9), (0, 7, 2)])
async def test_a_smaller_token_is_refused_and_both_are_named(router, pair, epochs, update, attempt):
    epoch = next(EPOCHS) * 1000
    await router.control.set_table(token(epoch, 7, 3), table(pair[0]))
    await router.control.set_table(token(epoch, 7, 3), table(*pair))  # asked again
    old = token(epoch + epochs, update, attempt)
    named = (
        rf"epoch {epoch + epochs}, update {update}, attempt {attempt}.*"
        rf"epoch {epoch}, update 7, attempt 3"
    )
    with pytest.raises(StaleFence, match=named):
        await router.control.set_table(old, table())
    with pytest.raises(StaleFence, match=named):
        await router.control.drain(old, "engine-0", 1)
    assert len((await router.control.state()).engines) == 2
    await router.control.drain(token(epoch, 7, 4), "engine-0", 1)


async def test_a_draining_engine_finishes_its_groups_and_takes_no_new_one(router, http, pair):
    first = pair[0]
    first.go.clear()
    await router.control.set_table(now := token(next(EPOCHS) * 1000), table(*pair))
    call = asyncio.create_task(http.post("/generate", headers=group("g", 2)))
    await router.until(lambda state: state.active_calls == 1)
    draining = asyncio.create_task(router.control.drain(now, "engine-0", 20))
    state = await router.until(lambda s: s.engines[0].engine.state is EngineState.DRAINING)
    assert not state.engines[0].routable
    for number in range(3):
        answer = await http.post("/generate", headers=group(f"new-{number}", 1))
        assert answer.json()["engine"] == "engine-1"
    first.go.set()
    assert (await call).json()["engine"] == "engine-0"
    # Its sibling is not sent yet: the group is still owed, and is finished where it began.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(draining), 0.2)
    answer = await http.post("/generate", headers=group("g", 2, 1))
    assert answer.json()["engine"] == "engine-0"
    await asyncio.wait_for(draining, DEADLINE_S)
    await router.control.drain(now, "engine-0", 1)  # again, at once
    state = await router.control.state()
    assert state.engines[0].engine.state is EngineState.DRAINING
    first.version = 1
    await router.control.set_table(now, table(*pair, versions=(0, 1)))
    assert all(each.routable for each in (await router.control.state()).engines)


async def test_a_released_group_is_not_waited_for(router, http, pair):
    await router.control.set_table(now := token(next(EPOCHS) * 1000), table(*pair))
    await http.post("/generate", headers=group("g", 8))
    draining = asyncio.create_task(router.control.drain(now, "engine-0", 20))
    await router.until(lambda s: s.engines[0].engine.state is EngineState.DRAINING)
    await http.post("/router/release", json={"groups": ["g"]})
    await asyncio.wait_for(draining, DEADLINE_S)


async def test_a_drain_that_takes_too_long_says_what_is_owed(router, http, pair):
    pair[0].go.clear()
    await router.control.set_table(now := token(next(EPOCHS) * 1000), table(pair[0]))
    call = asyncio.create_task(http.post("/generate", headers=group("g", 2)))
    await router.until(lambda state: state.active_calls == 1)
    with pytest.raises(ServiceUnreachable, match="engine-0 still owes 1 open calls and 1 groups"):
        await router.control.drain(now, "engine-0", 0.05)
    with pytest.raises(ContractViolation, match=r"no engine 'engine-9'.*engine-0"):
        await router.control.drain(now, "engine-9", 0.05)
    pair[0].go.set()
    assert (await call).status_code == 200


async def test_a_group_of_a_dead_sender_is_forgotten(router, http, pair):
    """Its sender died between two calls: by age, or at once when the next epoch begins."""
    epoch = next(EPOCHS) * 1000
    await router.control.set_table(token(epoch), table(pair[0]))
    await http.post("/generate", headers=group("g", 8))
    assert (await router.control.state()).engines[0].reserved_calls == 7
    await router.control.set_table(token(epoch + 1), table(pair[0]))
    assert (await router.control.state()).engines[0].reserved_calls == 0
    await http.post("/generate", headers=group("h", 8))
    assert (await router.control.state()).engines[0].reserved_calls == 7
    await router.until(lambda state: state.engines[0].reserved_calls == 0)


async def test_a_dead_engine_is_given_up_and_never_taken_back_by_itself(router, http, pair):
    first, second = pair
    epoch = next(EPOCHS) * 1000
    await router.control.set_table(token(epoch), table(*pair))
    first.healthy = False
    unavailable = EngineState.UNAVAILABLE
    state = await router.until(lambda s: s.engines[0].engine.state is unavailable)
    assert state.engines[0].failed_checks == 3
    first.healthy = True
    checks = first.health_checks
    await asyncio.sleep(3 * HEALTH_INTERVAL_S)
    assert first.health_checks == checks  # nobody asks any more
    # The same process stays out whatever a table says; its replacement is new.
    await router.control.set_table(token(epoch), table(*pair))
    assert [each.routable for each in (await router.control.state()).engines] == [False, True]
    for number in range(3):
        answer = await http.post("/generate", headers=group(str(number), 1))
        assert answer.json()["engine"] == "engine-1"
    await router.control.set_table(token(epoch), table(first.routed(incarnation=1), second))
    assert all(each.routable for each in (await router.control.state()).engines)


async def test_a_hanging_engine_that_is_given_up_ends_its_calls(router, http, pair):
    first = pair[0]
    first.go.clear()
    await router.control.set_table(token(next(EPOCHS) * 1000), table(first))
    call = asyncio.create_task(http.post("/generate", headers=group("g", 2)))
    await router.until(lambda state: state.active_calls == 1)
    first.healthy = False
    answer = await call
    assert (answer.status_code, answer.json()["detail"]) == (503, WORKER_UNAVAILABLE)
    answer = await http.post("/generate", headers=group("g", 2))
    assert (answer.status_code, answer.json()["detail"]) == (503, NO_HEALTHY_WORKERS)
    state = await router.control.state()
    assert (state.active_calls, state.engines[0].reserved_calls) == (0, 0)


async def test_an_engine_that_accepts_and_never_answers_is_given_up(router, http, pair):
    first = pair[0]
    async with FaultProxy(first.url) as proxy:
        proxy.plan = lambda seen: Hang()
        hanging = first.routed(url=proxy.url)
        await router.control.set_table(token(next(EPOCHS) * 1000), table(hanging))
        answer = await http.post("/generate", headers=group("g", 2))
        assert (answer.status_code, answer.json()["detail"]) == (503, WORKER_UNAVAILABLE)
        (status,) = (await router.control.state()).engines
        assert status.engine.state is EngineState.UNAVAILABLE


async def test_a_passing_fault_is_forgiven(router, pair):
    first = pair[0]
    await router.control.set_table(token(next(EPOCHS) * 1000), table(first))
    for _ in range(3):
        first.healthy = False
        await router.until(lambda state: state.engines[0].failed_checks > 0)
        first.healthy = True
        await router.until(lambda state: state.engines[0].failed_checks == 0)
    assert (await router.control.state()).engines[0].routable


async def test_an_engine_that_is_updated_is_not_judged(router, pair):
    first = pair[0]
    first.healthy = False
    updating = first.routed(state=EngineState.UPDATING)
    await router.control.set_table(now := token(next(EPOCHS) * 1000), table(updating))
    await asyncio.sleep(5 * HEALTH_INTERVAL_S)
    assert (await router.control.state()).engines[0].failed_checks == 0
    first.healthy = True
    await router.control.set_table(now, table(first))
    assert (await router.control.state()).engines[0].routable


async def test_an_engine_that_ends_while_it_is_updated_is_given_up(router, pair):
    updating = pair[0].routed(state=EngineState.UPDATING)
    await router.control.set_table(token(next(EPOCHS) * 1000), table(updating, pair[1]))
    await pair[0].close()
    state = await router.until(
        lambda state: state.engines[0].engine.state is EngineState.UNAVAILABLE
    )
    assert state.engines[1].routable


async def test_other_weights_behind_the_routers_back_end_its_use(router, http, pair):
    first, second = pair
    await router.control.set_table(now := token(next(EPOCHS) * 1000), table(*pair))
    first.version = 9
    await router.until(lambda state: not state.engines[0].routable)
    before = len(first.bodies)
    for number in range(3):
        await http.post("/generate", headers=group(str(number), 1))
    assert len(first.bodies) == before
    # It is not dead: registered with what it serves, it is used again.
    third = first.routed()
    await router.control.set_table(now, table(third, second, versions=(0, 9)))
    assert all(each.routable for each in (await router.control.state()).engines)
    await asyncio.sleep(2 * HEALTH_INTERVAL_S)
    assert all(each.routable for each in (await router.control.state()).engines)


async def test_a_fresh_router_lets_calls_wait_for_its_first_table(tmp_path, pair):
    async with (
        router_process(tmp_path, "--queue-timeout-s", "1") as router,
        httpx.AsyncClient(base_url=router.url, timeout=DEADLINE_S) as http,
    ):
        answer = await http.post("/generate")
        assert (answer.status_code, answer.json()["detail"]) == (503, NO_HEALTHY_WORKERS)
        call = asyncio.create_task(http.post("/generate"))
        await router.until(lambda state: state.waiting_calls == 1)
        await router.control.set_table(token(), table(pair[0]))
        assert (await call).json()["engine"] == "engine-0"


async def test_sigterm_finishes_what_runs_and_refuses_what_waits(tmp_path, pair):
    first, second = pair
    first.go.clear()
    updating = second.routed(version=1, state=EngineState.UPDATING)
    async with (
        router_process(tmp_path, "--shutdown-timeout-s", "20") as router,
        httpx.AsyncClient(base_url=router.url, timeout=DEADLINE_S) as http,
    ):
        await router.control.set_table(now := token(), table(first, updating))
        running = asyncio.create_task(http.post("/generate"))
        await router.until(lambda state: state.active_calls == 1)
        await router.control.set_table(
            now, table(first.routed(state=EngineState.DRAINING), updating)
        )
        waiting = asyncio.create_task(http.post("/generate"))
        await router.until(lambda state: state.waiting_calls == 1)
        router.process.send_signal(signal.SIGTERM)
        refused = await waiting
        assert (refused.status_code, refused.json()["detail"]) == (503, WORKER_UNAVAILABLE)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    async with httpx.AsyncClient() as other:
                        await other.get(f"{router.url}/health")
                except httpx.ConnectError:
                    break
                except httpx.ReadError:
                    continue  # it had been accepted when the door was shut
        assert router.process.returncode is None
        first.go.set()
        assert (await running).json()["engine"] == "engine-0"
        assert await asyncio.wait_for(router.process.wait(), DEADLINE_S) == 0


async def test_sigterm_cuts_what_runs_for_too_long(tmp_path, pair):
    pair[0].go.clear()
    async with (
        router_process(tmp_path, "--shutdown-timeout-s", "0.2") as router,
        httpx.AsyncClient(base_url=router.url, timeout=DEADLINE_S) as http,
    ):
        await router.control.set_table(token(), table(pair[0]))
        running = asyncio.create_task(http.post("/generate"))
        await router.until(lambda state: state.active_calls == 1)
        router.process.send_signal(signal.SIGTERM)
        answer = await running
        assert (answer.status_code, answer.json()["detail"]) == (503, WORKER_UNAVAILABLE)
        assert await asyncio.wait_for(router.process.wait(), DEADLINE_S) == 0
