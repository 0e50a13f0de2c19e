"""Engines: deaths are told at once, replacements start, a server that cannot start says why."""

import asyncio
from pathlib import Path

import psutil
import pytest
from fleet_rig import Run, kill, publish, statuses, until

from models.errors import ConfigurationError, StaleFence
from workers.actors.server import LOGS
from workers.fleet import RayFleet

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


async def test_deaths_are_told_as_they_happen_and_those_before_first(fleet: RayFleet, make_run):
    run: Run = make_run(inference={"num_engines": 2})
    await fleet.prepare(run.token(), run.request())
    pids = {name: actor.pid for name, actor in (await statuses(fleet, run)).items()}
    kill(pids["engine-0"])

    async def one_is_dead() -> bool:
        return len(await fleet.engines(run.ref)) == 1

    await until(one_is_dead, 5)
    async with fleet.engine_deaths(run.ref) as deaths, fleet.engine_deaths(run.ref) as others:
        async with asyncio.timeout(5):
            assert await anext(deaths) == "engine-0"
            assert await anext(others) == "engine-0"
        # The actor dies this time, and its server with it.
        waiting = asyncio.ensure_future(anext(deaths))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        kill(psutil.Process(pids["engine-1"]).ppid())
        async with asyncio.timeout(5):
            assert await waiting == "engine-1"

        fresh = await fleet.heal_engines(run.token(), run.ref)
        assert [engine.name for engine in fresh] == ["engine-0", "engine-1"]
        assert [engine.incarnation for engine in fresh] == [1, 1]
        # A replacement is watched like its predecessor, within the same context.
        again = asyncio.ensure_future(anext(deaths))
        await asyncio.sleep(1.5)
        kill((await statuses(fleet, run))["engine-0"].pid)
        async with asyncio.timeout(5):
            assert await again == "engine-0"
    assert not psutil.pid_exists(pids["engine-1"])


async def test_concurrent_heals_replace_an_engine_once(fleet: RayFleet, make_run):
    run: Run = make_run()
    await fleet.prepare(run.token(), run.request())
    await publish(fleet, run, run.token(), 0)
    kill((await statuses(fleet, run))["engine-0"].pid)

    first, second = await asyncio.gather(
        fleet.heal_engines(run.token(), run.ref), fleet.heal_engines(run.token(), run.ref)
    )

    assert first == second
    assert [engine.incarnation for engine in first] == [1]


async def test_all_engines_are_told_when_one_was_started(fleet: RayFleet, make_run):
    run: Run = make_run(inference={"num_engines": 2})
    await fleet.prepare(run.token(), run.request())
    before = await fleet.engines(run.ref)
    assert await fleet.ensure_engines(run.token(), run.ref) == before
    kill((await statuses(fleet, run))["engine-1"].pid)

    engines = await fleet.ensure_engines(run.token(), run.ref)

    assert engines == await fleet.engines(run.ref)
    assert [(each.name, each.incarnation) for each in engines] == [("engine-0", 0), ("engine-1", 1)]
    old = run.token()
    run.claim()
    with pytest.raises(StaleFence):
        await fleet.ensure_engines(old, run.ref)


async def test_a_server_that_cannot_start_is_reported_with_its_log(fleet: RayFleet, make_run):
    run: Run = make_run()
    await fleet.prepare(run.token(), run.request())
    weights = Path(run.ref.root) / "prepared" / "hf" / "model.safetensors"
    kill((await statuses(fleet, run))["engine-0"].pid)
    weights.rename(weights.with_suffix(".away"))

    with pytest.raises(ConfigurationError) as caught:
        await fleet.heal_engines(run.token(), run.ref)

    log = Path(run.ref.root) / LOGS / "engine-0.log"
    assert f"engine-0 refuses to start; end of {log}" in str(caught.value)
    assert "safetensors" in str(caught.value)
    assert await fleet.engines(run.ref) == ()
    weights.with_suffix(".away").rename(weights)
    (fresh,) = await fleet.heal_engines(run.token(), run.ref)
    assert fresh.incarnation == 2
