"""A server whose detokenizer is gone: alive in every way but one. It is found by a deadline.

The server is a process of its own, the other part is ended with SIGKILL.
"""

import asyncio
import dataclasses
import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from router_rig import DEADLINE_S, engine_client, pool_of_engines, router_process, token

from activities import engine_health, healing
from activities.healing import with_healing
from activities.wire.contract import GenerateRequest, SamplingParams
from models.errors import GenerationFault
from models.routing import EngineState, RoutedEngine, RoutingTable
from tests.support.fake_engines import FakeEngineClient
from tests.support.fake_fleet import FakeFleet, site_of
from tests.support.publication_bench import async_document, publication_bench
from tests.support.two_part_engine import TwoPartEngine, two_part_engine

LOOK_S = 0.3
LOOK_OPTIONS = ("--health-interval-s", str(LOOK_S), "--health-timeout-s", str(LOOK_S))


@pytest.fixture
async def engine() -> AsyncIterator[TwoPartEngine]:
    async with two_part_engine() as made:
        yield made


@pytest.fixture
async def healthy() -> AsyncIterator[TwoPartEngine]:
    async with two_part_engine() as made:
        yield made


def request() -> GenerateRequest:
    return GenerateRequest(
        rid=uuid.uuid4().hex,
        input_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_new_tokens=4),
    )


def cripple(engine: TwoPartEngine) -> None:
    os.kill(engine.detokenizer, signal.SIGKILL)


async def test_only_health_and_the_deadline_of_a_call_tell(engine: TwoPartEngine) -> None:
    async with aclosing(engine_client(engine.url)) as client:
        assert len((await client.generate(request(), timeout_s=DEADLINE_S)).output_ids) == 4
        assert await client.health()
        cripple(engine)
        with pytest.raises(GenerationFault, match="no answer after") as caught:
            await client.generate(request(), timeout_s=LOOK_S)
        assert caught.value.category == "timeout"
        assert (await client.model_info())["weight_version"] == "0"
        assert await client.alive()
        assert not await client.health(timeout_s=LOOK_S)


def routed(name: str, engine: TwoPartEngine) -> RoutedEngine:
    return RoutedEngine(name=name, url=engine.url, incarnation=0, version=0, digest="d")


async def test_the_router_gives_it_up_and_its_calls_are_free(
    engine: TwoPartEngine, healthy: TwoPartEngine, tmp_path: Path
) -> None:
    async with router_process(tmp_path, *LOOK_OPTIONS) as router:
        rows = (routed("engine-0", engine), routed("engine-1", healthy))
        await router.control.set_table(token(), RoutingTable(engines=rows, committed=((0, "d"),)))
        pool = pool_of_engines(routed=True)
        await pool.set_engines((router.url,))
        async with aclosing(pool), pool.reserve(1, timeout_s=1) as route:
            cripple(engine)
            stuck = asyncio.create_task(route.generate(request(), timeout_s=DEADLINE_S))
            state = await router.until(
                lambda state: state.engines[0].engine.state is EngineState.UNAVAILABLE
            )
            assert state.engines[1].routable
            with pytest.raises(GenerationFault) as caught:
                await stuck
            assert caught.value.category == "transport"
        async with aclosing(engine_client(router.url)) as client:
            assert len((await client.generate(request(), timeout_s=DEADLINE_S)).output_ids) == 4


class LookedAt(FakeEngineClient):
    """Control calls go to an engine in memory, looks to a real process."""

    def __init__(self, fleet: FakeFleet, url: str, real: TwoPartEngine) -> None:
        super().__init__(fleet.client(url).engine, fleet.script)
        self._real = engine_client(real.url)

    async def health(self, *, timeout_s: float) -> bool:
        return await self._real.health(timeout_s=timeout_s)

    async def aclose(self) -> None:
        await self._real.aclose()


async def test_a_run_without_a_router_replaces_it_while_a_collection_waits(
    engine: TwoPartEngine, healthy: TwoPartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "INTERVAL_S", LOOK_S)
    monkeypatch.setattr(engine_health, "TIMEOUT_S", LOOK_S)
    fleet = FakeFleet(1)
    real = {"http://engine-0.0": engine, "http://engine-0.1": healthy}
    site = dataclasses.replace(site_of(fleet), engine=lambda url: LookedAt(fleet, url, real[url]))
    document = async_document(tmp_path, num_engines=1)
    del document["async"], document["core"]
    bench = await publication_bench(fleet, document, site)
    await bench.publish(0)
    replaced = asyncio.Event()

    async def collection() -> None:
        cripple(engine)
        await replaced.wait()

    working = asyncio.create_task(
        with_healing(site, bench.run, bench.token(0, 2), bench.spec, collection)
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            while fleet.live_producer.urls != ("http://engine-0.1",):
                await asyncio.sleep(0.02)
        assert "replace engine-0" in fleet.log
        assert fleet.engine_list[0].version == 0, "loaded before it is routed to"
        # The new one answers: it is left alone.
        await asyncio.sleep(8 * LOOK_S)
        assert fleet.log.count("replace engine-0") == 1
    finally:
        replaced.set()
        await asyncio.wait_for(working, DEADLINE_S)
