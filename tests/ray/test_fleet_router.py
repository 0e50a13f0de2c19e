"""The router of a fully async run in the fleet: started, shown, missed, replaced, ended."""

import asyncio

import psutil
import pytest
from fleet_rig import Run, kill, site_of, statuses
from temporalio.testing import ActivityEnvironment

from activities.healing import heal
from activities.publish import publish
from activities.wire import router_client
from activities.wire.router_client import RouterClient
from models.errors import EngineLost, StaleFence
from models.publication import PublishRequest
from models.rollout import CollectRequest, RolloutCollection
from models.routing import RouterState
from workers.fleet import RayFleet
from workers.fleet.fleet import GIVEN_UP

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


async def state_of(fleet: RayFleet, run: Run) -> RouterState:
    router = await fleet.router(run.ref)
    assert router is not None
    client = RouterClient(router.url)
    try:
        return await client.state()
    finally:
        await client.aclose()


async def published(fleet: RayFleet, run: Run, version: int) -> None:
    request = PublishRequest(run=run.ref, epoch=run.epoch, update=version, version=version)
    await ActivityEnvironment().run(publish, site_of(fleet), request, run.token(version))


async def collected(fleet: RayFleet, run: Run, update: int) -> RolloutCollection:
    request = CollectRequest(
        run=run.ref,
        epoch=run.epoch,
        update=update,
        policy_version=update,
        consumed_through=update - 1,
    )
    async with asyncio.timeout(60):
        return await fleet.producer(run.ref).collect(run.token(update, 2), request)


async def test_a_router_that_dies_is_told_and_replaced(fleet: RayFleet, make_run):
    run: Run = make_run(**{"async": {"fully_async": True}}, inference={"num_engines": 2})
    report = await fleet.prepare(run.token(), run.request())
    assert set(report.rebuilt) == {"trainer", "engine-0", "engine-1", "router", "producer"}
    before = await statuses(fleet, run)
    assert before["router"].alive
    assert before["router"].url == (await fleet.router(run.ref)).url
    assert (await state_of(fleet, run)).engines == ()
    await published(fleet, run, 0)
    assert [each.routable for each in (await state_of(fleet, run)).engines] == [True, True]
    collection = await collected(fleet, run, 0)
    assert collection.counts.groups == 4

    async with fleet.engine_deaths(run.ref) as deaths:
        kill(before["router"].pid)
        async with asyncio.timeout(5):
            assert await anext(deaths) == "router"
        with pytest.raises(EngineLost, match="router"):
            await fleet.router(run.ref)
        assert not (await statuses(fleet, run))["router"].alive
        await heal(site_of(fleet), run.ref, run.token(1), 30.0)
    after = await statuses(fleet, run)
    assert {name: each.incarnation for name, each in after.items()} == {
        "engine-0": 0,
        "engine-1": 0,
        "router": 1,
        "producer": 0,
        "trainer": 0,
    }
    assert [each.routable for each in (await state_of(fleet, run)).engines] == [True, True]
    await fleet.trainer(run.ref).optimize(run.token(0, 3), 0, collection)
    await published(fleet, run, 1)
    assert (await collected(fleet, run, 1)).counts.groups == 4

    # A worker that prepares again keeps the router.
    run.claim()
    report = await fleet.prepare(run.token(1), run.request(next_update=1))
    assert report.rebuilt == ()
    await fleet.teardown(run.ref)
    assert not any(psutil.pid_exists(each.pid) for each in after.values())


async def test_a_router_that_hangs_is_replaced(fleet: RayFleet, make_run, monkeypatch):
    monkeypatch.setattr(router_client, "CONTROL_TIMEOUT_S", 0.5)
    run: Run = make_run(**{"async": {"fully_async": True}})
    await fleet.prepare(run.token(), run.request())
    await published(fleet, run, 0)
    before = (await statuses(fleet, run))["router"]
    psutil.Process(before.pid).suspend()
    await heal(site_of(fleet), run.ref, run.token(1), 30.0)
    after = (await statuses(fleet, run))["router"]
    assert (after.incarnation, after.alive) == (before.incarnation + 1, True)
    assert not psutil.pid_exists(before.pid)
    assert [each.routable for each in (await state_of(fleet, run)).engines] == [True]
    assert (await collected(fleet, run, 0)).counts.groups == 4


async def test_engines_are_replaced_although_they_live(fleet: RayFleet, make_run):
    run: Run = make_run(inference={"num_engines": 2})
    await fleet.prepare(run.token(), run.request())
    assert await fleet.router(run.ref) is None
    pid = (await statuses(fleet, run))["engine-1"].pid

    await fleet.replace_engines(run.token(), run.ref, ("engine-1",))

    assert not psutil.pid_exists(pid)
    assert [engine.name for engine in await fleet.engines(run.ref)] == ["engine-0"]
    (fresh,) = await fleet.heal_engines(run.token(), run.ref)
    assert (fresh.name, fresh.incarnation) == ("engine-1", 1)
    again = (await statuses(fleet, run))["engine-1"]
    assert (again.last_failure, again.reason) == GIVEN_UP
    old = run.token()
    run.claim()
    with pytest.raises(StaleFence):
        await fleet.replace_engines(old, run.ref, ("engine-1",))
