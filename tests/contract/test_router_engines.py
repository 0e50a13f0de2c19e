"""Two native engines behind a router: one is killed, then both, then one is replaced."""

import asyncio
import os
import signal
import sys
import uuid
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
from router_rig import DEADLINE_S, RouterProcess, pool_of_engines, router_process, token

from activities.wire.contract import GenerateRequest, SamplingParams
from activities.wire.engine_pool import EnginePool, Route
from models.errors import GenerationFault
from models.routing import EngineState, RoutedEngine, RouterState, RoutingTable
from workers.engines.process import ServerCommand, ServerProcess

SIBLINGS = 4


async def native(folder: Path, model: Path, name: str) -> ServerProcess:
    ready = folder / f"{name}.json"
    argv = [
        *(sys.executable, "-m", "workers.engines.native", "--model-path", str(model)),
        *("--dtype", "float32", "--ready-file", str(ready), "--weight-version", "0"),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = ServerCommand(name, tuple(argv), env, folder / f"{name}.log", ready)
    return await ServerProcess.start(command, DEADLINE_S)


def table_of(servers: dict[str, ServerProcess], incarnation: int = 0) -> RoutingTable:
    engines = (
        RoutedEngine(name=name, url=each.url, incarnation=incarnation, version=0, digest="d")
        for name, each in servers.items()
    )
    return RoutingTable(engines=tuple(engines), committed=((0, "d"),))


async def group(pool: EnginePool, max_new_tokens: int = 4) -> list[int]:
    """Response lengths of one group's siblings; raises what the first failing one raises."""

    async def ask(route: Route) -> int:
        sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        request = GenerateRequest(
            rid=uuid.uuid4().hex, input_ids=[1, 40, 41, 42], sampling_params=sampling
        )
        answer = await route.generate(request, timeout_s=DEADLINE_S)
        assert answer.meta_info.weight_version == "0"
        return len(answer.output_ids)

    async with pool.reserve(SIBLINGS, timeout_s=5) as route:
        tasks = [asyncio.create_task(ask(route)) for _ in range(SIBLINGS)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def requeued(pool: EnginePool) -> tuple[list[int], set[str]]:
    """A group that is attempted until it is whole, and the kinds of the faults on the way."""
    faults = set()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await group(pool), faults
            except GenerationFault as fault:
                faults.add(fault.category)
                await asyncio.sleep(0.1)  # a producer's back-off, shortened


def idle(state: RouterState) -> bool:
    return not any(each.active_calls + each.reserved_calls for each in state.engines)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_groups_survive_one_dead_engine_and_two(
    native_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        names = ("engine-0", "engine-1")
        started = await asyncio.gather(*(native(tmp_path, native_folders[0], n) for n in names))
        servers = dict(zip(names, started, strict=True))
        for server in started:
            stack.push_async_callback(server.stop, 1.0)
        router: RouterProcess = await stack.enter_async_context(
            router_process(tmp_path, "--health-interval-s", "0.2")
        )
        pool = await stack.enter_async_context(aclosing(pool_of_engines(routed=True)))
        await router.control.set_table(token(), table_of(servers))
        await pool.set_engines((router.url,))

        long = [asyncio.create_task(group(pool, 400)) for _ in range(2)]
        await router.until(
            lambda state: [e.active_calls for e in state.engines] == [SIBLINGS, SIBLINGS]
        )
        os.kill(servers["engine-0"].pid, signal.SIGKILL)
        results = await asyncio.gather(*long, return_exceptions=True)
        (lost,) = [each for each in results if isinstance(each, BaseException)]
        assert isinstance(lost, GenerationFault)
        assert lost.category == "transport"
        assert [400] * SIBLINGS in results
        for _ in range(3):
            # Whole on the other engine, at the first attempt or after one on the dead one.
            assert (await requeued(pool))[0] == [4] * SIBLINGS
        dead = await router.until(
            lambda state: state.engines[0].engine.state is EngineState.UNAVAILABLE
        )
        assert [each.routable for each in dead.engines] == [False, True]

        os.kill(servers["engine-1"].pid, signal.SIGKILL)
        await router.until(lambda state: not any(each.routable for each in state.engines))
        with pytest.raises(GenerationFault, match="No healthy rollout workers") as caught:
            await group(pool)
        assert caught.value.category == "unavailable"
        assert idle(await router.control.state())

        waiting = asyncio.create_task(requeued(pool))
        replacement = await native(tmp_path, native_folders[0], "engine-0")
        stack.push_async_callback(replacement.stop, 1.0)
        await router.control.set_table(token(), table_of({"engine-0": replacement}, 1))
        lengths, faults = await waiting
        assert lengths == [4] * SIBLINGS
        assert faults == {"unavailable"}
        await router.until(idle)
