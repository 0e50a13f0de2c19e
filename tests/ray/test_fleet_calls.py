"""Calls, names and placement on plain actors: errors come back as ours, nothing is orphaned."""

import asyncio
import os
import time

import pytest
from fleet_rig import kill

from models.errors import ConfigurationError, GenerationFault, ServiceUnreachable, TrainerLost
from workers.fleet import RayFleet
from workers.fleet.calls import RemoteActor
from workers.fleet.cluster import RayCluster
from workers.fleet.placement import CPU_SHARE, in_bundle, place, unplace

pytestmark = pytest.mark.ray

RUN_ID = "train/calls"


def plain_actor() -> type:
    """Defined inside a function, so that Ray ships it by value to workers without this file."""

    class Plain:
        def __init__(self, tag: str = "", error: Exception | None = None) -> None:
            if error is not None:
                raise error
            self.tag = tag
            self.cancelled = False
            self.finished = False

        async def facts(self) -> tuple[str, int]:
            return (self.tag, os.getpid())

        async def fail(self, error: Exception) -> None:
            raise error

        async def forever(self, seconds: float = 60.0) -> None:
            try:
                await asyncio.sleep(seconds)
                self.finished = True
            except asyncio.CancelledError:
                self.cancelled = True
                raise

        async def outcome(self) -> tuple[bool, bool]:
            return (self.cancelled, self.finished)

    return Plain


async def test_what_a_constructor_refuses_is_no_loss(cluster: RayCluster):
    for error, raised in (
        (ConfigurationError("install the extra perdure[s3]"), ConfigurationError),
        (ServiceUnreachable("not now"), TrainerLost),
        (ZeroDivisionError("1 / 0"), TrainerLost),
    ):
        await cluster.create(plain_actor(), RUN_ID, "trainer", {"num_cpus": 0}, {}, "", error)
        with pytest.raises(raised) as caught:
            await RemoteActor(cluster, RUN_ID, "trainer", TrainerLost).call("facts")
        assert type(caught.value) is raised
        assert str(error) in str(caught.value) or raised is TrainerLost
    await cluster.kill_named(RUN_ID, "trainer")


@pytest.fixture
async def cluster(fleet: RayFleet) -> RayCluster:
    return fleet._cluster


@pytest.fixture
async def actor(cluster: RayCluster):
    await cluster.create(plain_actor(), RUN_ID, "trainer", {"num_cpus": 0}, {}, "first")
    yield RemoteActor(cluster, RUN_ID, "trainer", TrainerLost)
    await cluster.kill_named(RUN_ID, "trainer")


async def test_an_actor_is_found_by_name_and_its_errors_keep_their_class(actor: RemoteActor):
    tag, _ = await actor.call("facts")
    assert tag == "first"

    with pytest.raises(GenerationFault) as caught:
        await actor.call("fail", GenerationFault("queue full", "capacity"))
    assert type(caught.value) is GenerationFault
    assert (caught.value.message, caught.value.category) == ("queue full", "capacity")
    assert "fail" in "".join(caught.value.__notes__)

    with pytest.raises(ZeroDivisionError):
        await actor.call("fail", ZeroDivisionError("1 / 0"))
    with pytest.raises(TimeoutError) as late:
        await actor.call("fail", TimeoutError("the actor's own deadline"))
    assert not isinstance(late.value, ServiceUnreachable)


async def test_death_ends_a_pending_call_at_once_and_every_later_one(actor: RemoteActor):
    _, pid = await actor.call("facts")
    pending = asyncio.ensure_future(actor.call("forever", timeout_s=None))
    await actor.call("outcome")
    killed = time.monotonic()

    kill(pid)

    async with asyncio.timeout(5):
        with pytest.raises(TrainerLost, match="trainer of train/calls"):
            await pending
    assert time.monotonic() - killed < 2
    for _ in range(2):
        with pytest.raises(TrainerLost):
            await actor.call("facts")


async def test_a_replaced_actor_is_found_again(cluster: RayCluster, actor: RemoteActor):
    await actor.call("facts")

    await cluster.create(plain_actor(), RUN_ID, "trainer", {"num_cpus": 0}, {}, "second")

    assert (await actor.call("facts"))[0] == "second"


async def test_creators_of_one_name_end_with_one_actor(cluster: RayCluster, actor: RemoteActor):
    await asyncio.gather(
        *(
            cluster.create(plain_actor(), RUN_ID, "trainer", {"num_cpus": 0}, {}, tag)
            for tag in ("second", "third")
        )
    )

    assert (await actor.call("facts"))[0] in ("second", "third")
    assert (await cluster.named_actors()).count((RUN_ID, "trainer")) == 1


async def test_an_actor_that_never_was_is_lost(cluster: RayCluster):
    with pytest.raises(TrainerLost, match="is not running"):
        await RemoteActor(cluster, "train/nobody", "trainer", TrainerLost).call("facts")


@pytest.mark.parametrize("cancel", [True, False])
async def test_a_cancelled_caller_takes_its_work_along_only_when_asked(
    actor: RemoteActor, cancel: bool
):
    seconds = 60.0 if cancel else 0.2
    call = asyncio.ensure_future(actor.call("forever", seconds, timeout_s=None, cancel=cancel))
    await actor.call("outcome")

    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    expected = (cancel, not cancel)
    async with asyncio.timeout(5):
        while await actor.call("outcome") != expected:
            await asyncio.sleep(0.01)


async def test_a_silent_actor_meets_the_deadline(actor: RemoteActor):
    with pytest.raises(ServiceUnreachable, match=r"forever\(\) within 0\.1 s"):
        await actor.call("forever", timeout_s=0.1)


def processes(number: int) -> list[dict[str, float]]:
    """Bundles of so many processes without GPUs."""
    return [{"CPU": CPU_SHARE}] * number


async def test_placement_is_held_found_again_and_released(cluster: RayCluster):
    group = await place(cluster, RUN_ID, "engines", processes(2), 20.0)
    try:
        again = await place(cluster, RUN_ID, "engines", processes(2), 20.0)
        assert again.id == group.id
        handle = await cluster.create(
            plain_actor(), RUN_ID, "engine-1", in_bundle(group, 1), {}, "placed"
        )
        assert (await handle.facts.remote())[0] == "placed"
        other = await place(cluster, RUN_ID, "engines", processes(3), 20.0)
        assert other.id != group.id
    finally:
        await cluster.kill_named(RUN_ID, "engine-1")
        await unplace(cluster, RUN_ID, "engines")
    await unplace(cluster, RUN_ID, "engines")


async def test_what_the_cluster_never_has_is_named(cluster: RayCluster):
    try:
        with pytest.raises(ConfigurationError, match=r"100 x 0\.05 = 5 CPU.* has 4"):
            await place(cluster, RUN_ID, "engines", processes(100), 0.2)
    finally:
        await unplace(cluster, RUN_ID, "engines")


async def test_what_others_hold_is_named(cluster: RayCluster):
    held = await place(cluster, "train/other", "engines", processes(79), 20.0)
    try:
        assert held is not None
        with pytest.raises(ServiceUnreachable, match=r"needs 0\.1 CPU, free are 0\.05"):
            await place(cluster, RUN_ID, "engines", processes(2), 0.2)
    finally:
        await unplace(cluster, "train/other", "engines")
        await unplace(cluster, RUN_ID, "engines")


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:1"])
async def test_a_cluster_that_is_not_there_is_told_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = time.monotonic()

    with pytest.raises(ServiceUnreachable):
        await RayFleet(address).join()

    assert time.monotonic() - started < 5
