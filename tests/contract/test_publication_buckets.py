"""Publication without files to a real engine: what it serves is proved, also past failures."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from activities.healing import heal
from activities.storage import layout
from activities.wire.client import EngineClient
from activities.wire.digest import weights_digest
from models.errors import DigestMismatch, StaleFence
from models.ids import FenceToken
from models.publication import WeightBucket, WeightsOffer, WeightsRef
from tests.support.native_fleet import NativeFleet, prepared, weights_of
from tests.support.publication_bench import PublicationBench, async_document
from tests.support.served_engine import ServedEngine
from workers.trainers.ranks import SingleRank
from workers.trainers.sending import WeightSender

DEADLINE_S = 50.0
BUCKET_BYTES = 30_000


@dataclasses.dataclass
class Sender:
    """The fake trainer's hands: the real sender of a real model, and faults."""

    fleet: NativeFleet
    folders: tuple[Path, Path]
    file: Path
    calls: list[str] = dataclasses.field(default_factory=list)
    spoil: dict[int, str] = dataclasses.field(default_factory=dict)
    """Bucket -> handle that it is given, once."""
    flip: bool = False
    """Every first bucket has one wrong bit."""

    def __post_init__(self) -> None:
        self.senders = [
            WeightSender(
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
                SingleRank(), torch.float32, BUCKET_BYTES, "ipc", lambda _: self.file,
            )
            for folder in self.folders
        ]  # fmt: skip
        self.offered: WeightsRef | None = None
        self.copied: WeightsRef | None = None
        trainer: Any = self.fleet.live_trainer
        trainer.offer_weights = self.offer
        trainer.pack_bucket = self.pack
        trainer.drop_bucket = self.drop
        trainer.export_weights = self.export
        trainer.keep_offered = self.keep
        trainer.kept = self.kept
        trainer.exported = self.exported

    async def offer(self, token: FenceToken, version: int) -> WeightsOffer:
        self.offered = self.senders[version].offer(version)
        return WeightsOffer(weights=self.offered)

    async def pack(self, token: FenceToken, version: int, index: int) -> WeightBucket:
        self.calls.append(f"pack {index}")
        bucket = self.senders[version].pack(version, index)
        if self.flip and index == 0:
            self.senders[version].flat(version, index)[100] ^= 1
        if index in self.spoil:
            return bucket.model_copy(update={"handles": {"cpu": self.spoil.pop(index)}})
        return bucket

    async def drop(self, token: FenceToken) -> None:
        self.calls.append("drop")
        for sender in self.senders:
            sender.drop()

    async def export(self, token: FenceToken, version: int) -> WeightsRef:
        self.calls.append(f"export {version}")
        self.offered = self.senders[version].describe(version, self.folders[version])
        return self.offered

    async def keep(self, token: FenceToken, version: int) -> None:
        assert self.offered is not None
        assert self.offered.version == version
        self.calls.append(f"keep {version}")
        self.copied = self.senders[version].describe(version, self.folders[version])

    async def kept(self, version: int) -> WeightsRef | None:
        self.calls.append(f"kept {version}")
        return self.copied

    async def exported(self) -> WeightsRef | None:
        return self.offered


@dataclasses.dataclass
class Rig:
    bench: PublicationBench
    sender: Sender
    url: str

    async def served(self) -> tuple[str, str]:
        """Version and digest, of bytes on the CPU."""
        client = EngineClient(self.url)
        version = (await client.model_info())["weight_version"]
        digest = weights_digest(await client.checksums())
        await client.aclose()
        return version, digest


@pytest.fixture
async def rig(
    engine: ServedEngine,
    native_folders: tuple[Path, Path],
    native_url: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Rig:
    document = async_document(tmp_path / "run", "barrier", num_engines=1)
    document["core"]["publication_transport"] = "ipc"
    if getattr(request, "param", "async") == "sequential":
        del document["async"]
    fleet = NativeFleet([native_url])
    bench = await prepared(fleet, document)
    return Rig(bench, Sender(fleet, native_folders, tmp_path / "memory" / "bucket"), native_url)


async def test_an_engine_serves_what_was_never_written(rig: Rig) -> None:
    await rig.bench.publish(0)
    del rig.sender.calls[:]
    report = await rig.bench.publish(1)
    proof = weights_of(rig.sender.folders[1], 1)
    assert await rig.served() == ("1", proof.digest)
    assert (report.transport, report.replaced, report.repeated_version) == ("ipc", (), False)
    assert report.num_bytes == proof.num_bytes
    packs = [f"pack {index}" for index in range(report.num_buckets)]
    assert report.num_buckets > 2
    # The copy for replacements comes last, when engines sample again.
    assert rig.sender.calls == [*packs, "drop", "keep 1"]
    row = rig.bench.rows(layout.PUBLICATION)[-1]
    assert (row["transport"], row["buckets"], row["tensors"]) == (
        "ipc", report.num_buckets, proof.num_tensors,
    )  # fmt: skip
    assert not rig.sender.file.exists()


async def test_nothing_moves_when_it_is_served(rig: Rig) -> None:
    await rig.bench.publish(1)
    del rig.sender.calls[:]
    report = await rig.bench.publish(1, attempt=2)
    assert (report.repeated_version, rig.sender.calls) == (True, ["drop", "keep 1"])
    assert rig.bench.rows(layout.PUBLICATION)[-1]["buckets"] == 0


async def test_an_engine_that_refuses_a_bucket_is_replaced_and_gets_all_of_them(rig: Rig) -> None:
    await rig.bench.publish(0)
    del rig.sender.calls[:]
    rig.sender.spoil[1] = "bm8gaGFuZGxl"
    report = await rig.bench.publish(1)
    assert [(each.engine, each.phase) for each in report.replaced] == [("engine-0", "load")]
    assert "cannot be opened" in report.replaced[0].error
    assert rig.sender.calls[:4] == ["pack 0", "pack 1", "drop", "pack 0"]
    assert await rig.served() == ("1", weights_of(rig.sender.folders[1], 1).digest)


async def test_one_wrong_bit_fails_the_publication(rig: Rig) -> None:
    await rig.bench.publish(0)
    rig.sender.flip = True
    with pytest.raises(DigestMismatch, match="weights of version 1 have digest"):
        await rig.bench.publish(1)


async def test_who_lost_the_epoch_packs_nothing(rig: Rig) -> None:
    await rig.bench.publish(0)
    del rig.sender.calls[:]
    root = Path(rig.bench.run.root)
    (root / "lease").mkdir(exist_ok=True)
    (root / layout.epoch_file(2)).write_text("{}")
    with pytest.raises(StaleFence, match="epoch 2 owns the root"):
        await rig.bench.publish(1)
    assert rig.sender.calls == []


@pytest.mark.parametrize("rig", ["sequential"], indirect=True)
async def test_a_replaced_engine_of_a_sequential_run_has_the_folder_written(rig: Rig) -> None:
    await rig.bench.publish(0)
    await rig.bench.publish(1)
    assert "export 1" not in rig.sender.calls
    rig.bench.fleet.kill_engine(0)
    await heal(rig.bench.site, rig.bench.run, rig.bench.token(1), DEADLINE_S)
    assert rig.sender.calls[-1] == "export 1"
    assert await rig.served() == ("1", weights_of(rig.sender.folders[1], 1).digest)


async def test_a_replaced_engine_of_an_async_run_takes_the_copy(rig: Rig) -> None:
    """The trainer may be in an update then, and holds other weights."""
    await rig.bench.publish(0)
    await rig.bench.publish(1)
    rig.bench.fleet.kill_engine(0)
    await heal(rig.bench.site, rig.bench.run, rig.bench.token(1), DEADLINE_S)
    assert rig.sender.calls[-1] == "kept 1"
    assert not any(call.startswith("export") for call in rig.sender.calls)
    assert await rig.served() == ("1", weights_of(rig.sender.folders[1], 1).digest)
