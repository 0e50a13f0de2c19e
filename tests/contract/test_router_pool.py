"""A producer's pool in front of a real router: nothing stays reserved, however a group ends."""

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest
from fault_proxy import Close, FaultProxy
from router_rig import RouterProcess, StubEngine, pool_of_engines, router_process, table, token

from activities.wire.contract import GenerateRequest, GenerateResponse
from activities.wire.engine_pool import EnginePool, Route
from models.errors import GenerationFault
from models.routing import RouterState


@pytest.fixture(scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterProcess]:
    async with router_process(tmp_path_factory.mktemp("router")) as process:
        yield process


@pytest.fixture
async def engine() -> AsyncIterator[StubEngine]:
    async with StubEngine("engine-0") as made:
        yield made


@pytest.fixture
async def pool(router: RouterProcess, engine: StubEngine) -> AsyncIterator[EnginePool]:
    await router.control.set_table(token(), table(engine))
    made = pool_of_engines(routed=True)
    await made.set_engines((router.url,))
    yield made
    await made.aclose()


def idle(state: RouterState) -> bool:
    return not any(each.active_calls + each.reserved_calls for each in state.engines)


async def ask(route: Route) -> GenerateResponse:
    return await route.generate(
        GenerateRequest(rid=uuid.uuid4().hex, input_ids=[1, 2]), timeout_s=20
    )


async def test_a_group_that_ends_well_is_over_with_its_last_answer(router, engine, pool):
    async with pool.reserve(3, timeout_s=5) as route:
        await ask(route)
        state = await router.control.state()
        assert state.engines[0].reserved_calls == 2
        await asyncio.gather(ask(route), ask(route))
        assert idle(await router.control.state())


async def test_a_group_that_fails_whole_leaves_nothing_reserved(router, engine, pool):
    async with FaultProxy(engine.url) as proxy:
        await router.control.set_table(token(), table(engine.routed(url=proxy.url)))
        engine.go.clear()
        proxy.plan = lambda seen: Close() if proxy.count("/generate") == 4 else None

        async def attempt() -> None:
            async with pool.reserve(8, timeout_s=5) as route, asyncio.TaskGroup() as siblings:
                for _ in range(4):
                    siblings.create_task(ask(route))

        with pytest.raises(ExceptionGroup) as caught:
            await attempt()
        (fault,) = caught.value.exceptions
        assert isinstance(fault, GenerationFault)
        assert fault.category == "transport"
        await router.until(idle)


async def test_a_group_that_is_cancelled_while_parked_leaves_nothing_reserved(router, engine, pool):
    parked = asyncio.Event()

    async def attempt() -> None:
        async with pool.reserve(8, timeout_s=5) as route:
            await ask(route)
            parked.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(attempt())
    await parked.wait()
    assert (await router.control.state()).engines[0].reserved_calls == 7
    working.cancel()
    await asyncio.wait({working})
    await router.until(idle)


async def test_a_call_that_was_handed_back_is_sent_again_in_its_group(router, engine, pool):
    async with pool.reserve(2, timeout_s=5) as route:
        engine.reason = "abort"
        await asyncio.gather(ask(route), ask(route))
        engine.reason = "stop"
        await ask(route)
        assert (await router.control.state()).engines[0].reserved_calls == 1
        await ask(route)
        assert idle(await router.control.state())


async def test_a_group_that_sent_nothing_has_nothing_to_release(router, engine, pool):
    with pytest.raises(ZeroDivisionError):
        async with pool.reserve(2, timeout_s=5):
            raise ZeroDivisionError
    assert idle(await router.control.state())


async def test_every_request_can_be_aborted_and_a_dead_engine_is_no_error(router, engine, pool):
    await pool.abort_all()
    assert len(engine.aborts) == 1
    await engine.close()
    await pool.abort_all()
    alone = pool_of_engines()
    await alone.set_engines((engine.url,))
    await alone.abort_all()
    await alone.aclose()
