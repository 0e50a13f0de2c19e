"""Engines of a colocated run take their memory back while the trainer offers its weights."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from activities.site import Site
from activities.storage import layout
from activities.wire.digest import weights_digest
from activities.wire.memory_marks import RESUMED
from models.errors import ServiceUnreachable, StaleFence, TrainerLost
from models.ids import FenceToken
from models.ports import EngineHandle
from models.publication import TensorMeta, WeightBucket, WeightsOffer, WeightsRef
from tests.support.fake_engines import FakeEngineClient, checksums_of
from tests.support.fake_fleet import FakeFleet, ListTracker
from tests.support.publication_bench import PublicationBench, async_document, publication_bench

DEADLINE_S = 20.0
RELEASED = "released:kv_cache,weights"
WAKES = ["wake engine-0", "wake engine-1"]


class OpeningClient(FakeEngineClient):
    """An engine that opens a bucket, and plays its way back to sampling."""

    async def resume(self) -> None:
        self._answer()
        await self.script.play(f"resume {self.engine.name}")
        await super().resume()

    async def update_weights_from_tensor(
        self,
        handles: Mapping[str, str],
        engine_gpus: Sequence[str],
        version: int | None,
        timeout_s: float,
        *,
        flush_cache: bool,
    ) -> None:
        self._answer()
        assert self.engine.paused
        assert self.engine.mark != RELEASED
        await self.script.play(f"open {self.engine.name} {handles[engine_gpus[0]]}")
        assert version is not None
        self.engine.version, self.engine.mark = version, ""
        self.engine.loaded = checksums_of(version)


class SharingFleet(FakeFleet):
    """Two engines on the trainer's GPUs. Its one bucket has a new handle whenever it is packed."""

    def __init__(self) -> None:
        super().__init__(2)
        self.packed: WeightBucket | None = None
        self.packs = 0

    async def engines(self, run: Any) -> tuple[EngineHandle, ...]:
        found = await super().engines(run)
        return tuple(each.model_copy(update={"gpus": (each.name[-1],)}) for each in found)

    def client(self, url: str) -> OpeningClient:
        known = super().client(url)
        return OpeningClient(known.engine, self.script)

    async def offer_weights(self, token: FenceToken, version: int) -> WeightsOffer:
        self.live_trainer.guard.admit(token)
        bucket = self.packed or self.pack(version)
        await self.script.play(f"offer {version}")
        weights = WeightsRef(
            version=version, path="", digest=weights_digest(checksums_of(version)),
            checksum="fingerprint", transport="ipc", num_buckets=1, num_tensors=1, num_bytes=8,
            dtype="bfloat16",
        )  # fmt: skip
        return WeightsOffer(weights=weights, bucket=bucket)

    async def pack_bucket(self, token: FenceToken, version: int, index: int) -> WeightBucket:
        self.live_trainer.guard.admit(token)
        await self.script.play(f"pack {index}")
        return self.packed or self.pack(version)

    async def drop_bucket(self, token: FenceToken) -> None:
        self.live_trainer.guard.admit(token)
        await self.script.play("drop")
        self.packed = None

    def pack(self, version: int) -> WeightBucket:
        self.packs += 1
        self.packed = WeightBucket(
            version=version, index=0, tensors=(TensorMeta("model.weight", "bfloat16", (2, 2)),),
            num_bytes=8, handles=dict.fromkeys("01", f"h{self.packs}"),
        )  # fmt: skip
        return self.packed

    def give_back(self) -> None:
        """All engines give their memory back, as before a step."""
        for engine in self.engine_list:
            engine.paused, engine.mark = True, RELEASED
        self.log.clear()


@pytest.fixture
async def fleet() -> SharingFleet:
    return SharingFleet()


@pytest.fixture
async def bench(fleet: SharingFleet, tmp_path: Path) -> PublicationBench:
    document = async_document(tmp_path, "barrier", engine="sglang")
    del document["async"]
    document["placement"] = {"mode": "colocated"}
    document["trainer"] = {"num_processes": 2}
    site = Site(fleet=fleet, tracker=ListTracker(), engine=fleet.client, router=fleet.router_client)
    made = await publication_bench(fleet, document, site)
    trainer: Any = fleet.live_trainer
    for call in (fleet.offer_weights, fleet.pack_bucket, fleet.drop_bucket):
        setattr(trainer, call.__name__, call)
    fleet.give_back()
    return made


async def test_engines_wake_while_the_trainer_packs(
    bench: PublicationBench, fleet: SharingFleet
) -> None:
    gate = fleet.script.hold("offer 1")
    publishing = asyncio.create_task(bench.publish(1))
    async with asyncio.timeout(DEADLINE_S):
        for call in ("offer 1", *WAKES):
            await fleet.script.reached(call)
    assert all(engine.paused and engine.version != 1 for engine in fleet.engine_list)
    gate.set()
    report = await asyncio.wait_for(publishing, DEADLINE_S)
    assert fleet.log.count("drop") == 2  # before all else, and when the bucket was opened
    assert fleet.log[0] == "drop"
    assert [call for call in fleet.log if call.startswith("pack")] == []  # the offer brought it
    assert [(each.version, each.mark, each.paused) for each in fleet.engine_list] == [
        (1, "", False), (1, "", False),
    ]  # fmt: skip
    assert (fleet.packs, fleet.packed, report.replaced) == (1, None, ())
    (row,) = bench.rows(layout.PUBLICATION)
    assert row["memory_seconds"] > 0.0


async def test_who_is_refused_by_the_trainer_takes_no_memory_from_it(
    bench: PublicationBench, fleet: SharingFleet
) -> None:
    fleet.live_trainer.guard.admit(bench.token(7))
    with pytest.raises(StaleFence, match="refused"):
        await bench.publish(1)
    assert fleet.log == []
    assert [engine.mark for engine in fleet.engine_list] == [RELEASED, RELEASED]


async def test_who_waits_for_a_step_of_the_trainer_takes_no_memory_from_it(
    bench: PublicationBench, fleet: SharingFleet
) -> None:
    gate = fleet.script.hold("drop")
    publishing = asyncio.create_task(bench.publish(1))
    await asyncio.wait_for(fleet.script.reached("drop"), DEADLINE_S)
    for _ in range(20):  # what could go on would
        await asyncio.sleep(0)
    assert [engine.mark for engine in fleet.engine_list] == [RELEASED, RELEASED]
    gate.set()
    assert (await asyncio.wait_for(publishing, DEADLINE_S)).version == 1


async def test_an_engine_that_does_not_wake_is_replaced_without_the_bucket(
    bench: PublicationBench, fleet: SharingFleet
) -> None:
    """Its replacement counts on the memory; the survivor is woken once, and gets the next one."""
    fleet.script.fail("wake engine-1", ServiceUnreachable("no answer"))
    report = await bench.publish(1)
    assert [(each.engine, each.phase, each.error) for each in report.replaced] == [
        ("engine-1", "wake", "no answer"),
    ]
    kept = [call for call in fleet.log if call.split()[0] in ("drop", "replace", "pack")]
    assert kept == ["drop", "drop", "replace engine-1", "pack 0", "drop"]
    opened = sorted(call for call in fleet.log if call.startswith("open"))
    assert opened == ["open engine-0 h2", "open engine-1 h2"]


async def test_engines_stay_closed_when_the_trainer_is_lost(
    bench: PublicationBench, fleet: SharingFleet
) -> None:
    """The next attempt finds them awake and goes on."""
    fleet.script.fail("offer 1", TrainerLost("the trainer died"))
    with pytest.raises(TrainerLost):
        await bench.publish(1)
    assert [(each.mark, each.paused) for each in fleet.engine_list] == [(RESUMED, True)] * 2
    fleet.log.clear()
    report = await bench.publish(1, attempt=2)
    assert [call for call in fleet.log if call.startswith("wake")] == []
    assert (report.version, report.repeated_version) == (1, False)
    assert [(each.version, each.paused) for each in fleet.engine_list] == [(1, False)] * 2


async def test_the_producer_hears_of_engines_while_they_are_resumed(
    bench: PublicationBench, fleet: SharingFleet
) -> None:
    gate = fleet.script.hold("resume engine-0")
    publishing = asyncio.create_task(bench.publish(1))
    async with asyncio.timeout(DEADLINE_S):
        await fleet.script.reached("resume engine-0")
        while fleet.live_producer.urls == ():
            await asyncio.sleep(0)
    assert not publishing.done()
    gate.set()
    assert (await asyncio.wait_for(publishing, DEADLINE_S)).version == 1
    assert fleet.live_producer.urls == tuple(engine.url for engine in fleet.engine_list)


async def test_the_producer_hears_of_what_replaces_an_engine_that_does_not_resume(
    bench: PublicationBench, fleet: SharingFleet
) -> None:
    former = tuple(engine.url for engine in fleet.engine_list)
    fleet.script.fail("resume engine-1", ServiceUnreachable("no answer"))
    report = await bench.publish(1)
    assert [(each.engine, each.phase) for each in report.replaced] == [("engine-1", "resume")]
    assert fleet.live_producer.urls == tuple(engine.url for engine in fleet.engine_list)
    assert fleet.live_producer.urls != former
