"""A tiny real run on real actors: every stage, every death, every way back."""

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest
from fleet_rig import Run, commit, kill, publish, site_of, statuses, until, update

from activities.healing import heal
from activities.loading import LoadOrder, load_engine
from activities.storage import layout
from activities.storage.store import Store
from models.errors import ProducerLost, StaleFence, TrainerLost
from models.rollout import CollectionManifest, CollectRequest
from models.update import UpdateReport
from workers.fleet import RayFleet
from workers.fleet.folders import export_folders, scratch_folder
from workers.source_digest import source_digest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


async def test_a_fresh_fleet_trains_saves_and_ends(
    fleet: RayFleet, make_unprepared_run, tmp_path: Path
):
    kernels = tmp_path / "kernels"
    run: Run = make_unprepared_run(launch={"env": {"PERDURE_COMPILER_CACHE": str(kernels)}})

    report = await fleet.prepare(run.token(), run.request())

    assert set(report.rebuilt) == {"trainer", "engine-0", "producer"}
    assert (report.next_update, report.policy_version, report.consumed_through) == (0, 0, -1)
    assert (report.train_prompts, report.eval_prompts) == (16, 4)
    actors = await statuses(fleet, run)
    assert sorted(actors) == ["engine-0", "producer", "trainer"]
    for name, actor in actors.items():
        assert actor.alive
        assert actor.incarnation == 0
        assert actor.code_digest == source_digest()
        assert psutil.pid_exists(actor.pid), name
    await publish(fleet, run, run.token(), 0)
    assert await fleet.heal_engines(run.token(), run.ref) == ()
    first = await update(fleet, run, 0)
    assert (first.update, first.policy_version) == (0, 1)
    assert await fleet.trainer(run.ref).exported() is not None
    checkpoint = await commit(fleet, run, 0)
    assert checkpoint.policy_version == 1

    compiled = scratch_folder(run.ref.root) / "compiler-trainer" / "triton" / "k" / "k.cubin"
    compiled.parent.mkdir(parents=True)
    compiled.write_bytes(b"code")
    await fleet.publish_caches(run.ref)
    rows = Store(run.ref.root).read_jsonl(layout.COMPILER_CACHE).rows
    assert [(row["work"], row["outcome"], row.get("actor")) for row in rows] == [
        ("restore", "miss", None),
        ("publish", "published", "trainer"),
        ("publish", "unchanged", "engine-0"),
    ]
    assert list(kernels.glob("trainer-cpu-*/CURRENT.json"))

    pids = [actor.pid for actor in (await statuses(fleet, run)).values()]
    await fleet.teardown(run.ref)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not scratch_folder(run.ref.root).exists()
    assert not any(folder.exists() for folder in export_folders(run.ref.root))
    assert not any(actor.alive for actor in (await statuses(fleet, run)).values())
    await fleet.teardown(run.ref)


async def test_each_component_is_rebuilt_alone(fleet: RayFleet, make_run):
    run: Run = make_run(inference={"num_engines": 2})
    await fleet.prepare(run.token(), run.request())
    await publish(fleet, run, run.token(), 0)
    trained = [(await update(fleet, run, 0)).policy_version]
    weights = await publish(fleet, run, run.token(1), 1)
    before = await statuses(fleet, run)

    # An engine: replaced with the next incarnation, and not routed to before it has the weights.
    async with fleet.engine_deaths(run.ref) as deaths:
        kill(before["engine-1"].pid)
        async with asyncio.timeout(5):
            assert await anext(deaths) == "engine-1"
    (fresh,) = await fleet.heal_engines(run.token(1), run.ref)
    assert (fresh.name, fresh.incarnation) == ("engine-1", 1)
    assert await fleet.heal_engines(run.token(1), run.ref) == (fresh,)
    site = site_of(fleet)
    await load_engine(site, LoadOrder(run.ref, run.token(1), weights, 30.0), fresh)
    assert await fleet.heal_engines(run.token(1), run.ref) == ()
    await heal(site, run.ref, run.token(1), 30.0)

    # The producer: the trainer and the engines stay, data goes on behind what was trained.
    kill(before["producer"].pid)
    with pytest.raises(ProducerLost):
        await fleet.producer(run.ref).data_state(0)
    run.claim()
    report = await fleet.prepare(run.token(1), run.request(next_update=1))
    assert report.rebuilt == ("producer",)
    assert (report.next_update, report.consumed_through) == (1, 0)
    manifest = CollectionManifest.model_validate(
        run.store.read_json(layout.collection_manifest(0, run.epoch - 1))
    )
    assert await fleet.producer(run.ref).data_state(0) == manifest.data_after
    await publish(fleet, run, run.token(1), 1)
    trained.append((await update(fleet, run, 1)).policy_version)
    checkpoint = await commit(fleet, run, 1)

    # The trainer: back to the checkpoint, the producer with it, the engines stay.
    await publish(fleet, run, run.token(2), 2)
    trained.append((await update(fleet, run, 2)).policy_version)
    kill(before["trainer"].pid)
    with pytest.raises(TrainerLost):
        await fleet.trainer(run.ref).progress()
    run.claim()
    report = await fleet.prepare(run.token(3), run.request(next_update=3, checkpoint=checkpoint))
    assert report.rebuilt == ("trainer", "producer")
    assert (report.next_update, report.policy_version) == (2, 2)
    with pytest.raises(StaleFence):
        await fleet.trainer(run.ref).export_weights(
            run.token(9).model_copy(update={"epoch": run.epoch - 1}), 2
        )
    await publish(fleet, run, run.token(2), 2)
    trained.append((await update(fleet, run, 2)).policy_version)
    assert trained == [1, 2, 3, 3]
    after = await statuses(fleet, run)
    assert {name: actor.incarnation for name, actor in after.items()} == {
        "engine-0": 0,
        "engine-1": 1,
        "producer": 2,
        "trainer": 1,
    }
    assert after["engine-0"].pid == before["engine-0"].pid
    for name, actor in after.items():
        process = psutil.Process(actor.pid)
        assert actor.started_unix == pytest.approx(process.create_time(), abs=0.02), name
    causes = {name: (actor.last_failure, actor.reason) for name, actor in after.items()}
    assert causes["engine-0"] == ("", "")
    assert causes["engine-1"] == ("EngineLost", "its process ended: see logs/engine-1.log")
    assert causes["trainer"][0] == "TrainerLost"
    assert "died during" in causes["trainer"][1]
    assert causes["producer"] == ("", "the run went back to where its files are")


async def test_another_worker_attaches_to_the_same_actors(
    fleet: RayFleet, ray_address: str, make_run
):
    run: Run = make_run()
    await fleet.prepare(run.token(), run.request())
    await publish(fleet, run, run.token(), 0)
    request = CollectRequest(
        run=run.ref, epoch=run.epoch, update=0, policy_version=0, consumed_through=-1
    )
    collection = await fleet.producer(run.ref).collect(run.token(0, 2), request)
    before = await statuses(fleet, run)
    other = RayFleet(ray_address)

    # The report of this update is lost with its worker; the other one asks for the update again.
    await fleet.trainer(run.ref).optimize(run.token(0, 3), 0, collection)
    run.claim()
    report = await other.prepare(run.token(0), run.request(next_update=0))

    assert report.rebuilt == ()
    assert (report.next_update, report.policy_version, report.consumed_through) == (1, 1, 0)
    assert {name: actor.pid for name, actor in (await statuses(other, run)).items()} == {
        name: actor.pid for name, actor in before.items()
    }
    # An update that still runs when the other worker prepares is either refused or counted.
    await publish(other, run, run.token(1), 1)
    request = request.model_copy(
        update={"epoch": run.epoch, "update": 1, "policy_version": 1, "consumed_through": 0}
    )
    collection = await other.producer(run.ref).collect(run.token(1, 2), request)
    running = asyncio.ensure_future(fleet.trainer(run.ref).optimize(run.token(1, 3), 1, collection))
    await asyncio.sleep(0.01)
    run.claim()
    report = await other.prepare(run.token(1), run.request(next_update=1))
    (outcome,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(outcome, UpdateReport | StaleFence)
    assert report.next_update == (2 if isinstance(outcome, UpdateReport) else 1)
    # A wish to start exactly from a checkpoint (here: none) overrides a living trainer.
    run.claim()
    report = await other.prepare(run.token(0), run.request(next_update=0, resume_exactly=True))
    assert report.rebuilt == ("trainer", "producer")
    assert report.next_update == 0
    # The first worker's handles are of dead actors; it finds the new ones by name.
    assert (await fleet.trainer(run.ref).progress()).stage == "idle"


async def test_a_revoked_epoch_is_refused_everywhere(fleet: RayFleet, make_run):
    run: Run = make_run()
    await fleet.prepare(run.token(), run.request())
    await publish(fleet, run, run.token(), 0)

    await fleet.revoke(run.ref, run.epoch)

    with pytest.raises(StaleFence):
        await fleet.trainer(run.ref).export_weights(run.token(1), 0)
    with pytest.raises(StaleFence):
        await update(fleet, run, 0)
    old = run.token(0, 5)
    run.claim()
    with pytest.raises(StaleFence):
        await fleet.heal_engines(old, run.ref)
    with pytest.raises(StaleFence):
        await fleet.prepare(old, run.request())


async def test_teardown_ends_a_half_dead_fleet_and_its_servers(fleet: RayFleet, make_run):
    run: Run = make_run(inference={"num_engines": 2})
    await fleet.prepare(run.token(), run.request())
    pids = {name: actor.pid for name, actor in (await statuses(fleet, run)).items()}
    kill(pids["trainer"])
    kill(pids["engine-0"])
    actor_of_engine_1 = psutil.Process(pids["engine-1"]).ppid()
    kill(actor_of_engine_1)

    async def server_gone() -> bool:
        return not psutil.pid_exists(pids["engine-1"])

    await until(server_gone, 5)
    await fleet.revoke(run.ref, run.epoch)
    await fleet.teardown(run.ref)

    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert await fleet.engines(run.ref) == ()


async def test_only_fleets_of_ended_runs_are_reaped(fleet: RayFleet, make_run):
    kept: Run = make_run()
    ended: Run = make_run()
    for run in (kept, ended):
        await fleet.prepare(run.token(), run.request())
    asked = []

    async def is_open(run_id: str) -> bool:
        asked.append(run_id)
        return run_id == kept.ref.run_id

    reaped = await fleet.reap(is_open)

    # An actor whose creation was cut off in an earlier test may have come late; it goes as well.
    assert ended.ref.run_id in reaped
    assert kept.ref.run_id not in reaped
    assert set(asked) >= {kept.ref.run_id, ended.ref.run_id}
    assert all(actor.alive for actor in (await statuses(fleet, kept)).values())
    assert not any(actor.alive for actor in (await statuses(fleet, ended)).values())
    with contextlib.suppress(TrainerLost):
        await fleet.trainer(ended.ref).progress()
        pytest.fail("a reaped trainer answered")
