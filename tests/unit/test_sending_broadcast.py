"""Weights by broadcast: who joins which group, and what one member's failure costs."""

from pathlib import Path
from typing import Any

import pytest

from activities.site import Site
from activities.wire.contract import InitWeightsUpdateGroup
from activities.wire.digest import weights_digest
from models.errors import ContractViolation, EngineLost, ServiceUnreachable
from models.ids import FenceToken
from models.ports import EngineHandle
from models.publication import TensorMeta, WeightBucket, WeightChannel, WeightsOffer, WeightsRef
from tests.support.fake_engines import FakeEngine, FakeEngineClient, checksums_of
from tests.support.fake_fleet import FakeFleet, ListTracker
from tests.support.publication_bench import PublicationBench, async_document, publication_bench

TENSORS = (TensorMeta("model.weight", "bfloat16", (2, 2)),)
BUCKETS = 2


class ReceivingClient(FakeEngineClient):
    """An engine that joins groups and receives; it has a version once the last bucket is there."""

    groups: dict[str, set[str]] = {}  # noqa: RUF012  (engine and incarnation -> groups joined)

    @property
    def _joined(self) -> set[str]:
        return self.groups.setdefault(self.engine.url, set())

    async def init_weights_update_group(
        self, group: InitWeightsUpdateGroup, *, timeout_s: float
    ) -> None:
        self._answer()
        await self.script.play(f"join {self.engine.name} {group.rank_offset}/{group.world_size}")
        self._joined.add(group.group_name)

    def adopt_weights_update_group(self, name: str) -> None:
        assert name in self._joined

    async def update_weights_from_distributed(
        self, group: str, tensors: Any, version: int | None, timeout_s: float, *, flush_cache: bool
    ) -> None:
        self._answer()
        assert self.engine.paused
        assert tuple(tensors) == TENSORS
        assert flush_cache == (version is not None)
        await self.script.play(f"receive {self.engine.name} {version}")
        if version is not None:
            self.engine.version, self.engine.mark = version, ""
            self.engine.loaded = checksums_of(version)


class BroadcastFleet(FakeFleet):
    """Two engines; engine-1 computes on two GPUs. The trainer keeps a group while members stay."""

    def __init__(self) -> None:
        super().__init__(2, with_router=True)
        self.members: tuple[tuple[str, int], ...] = ()
        self.numbers = 0
        self.connected = False

    async def spawn(self, name: str, incarnation: int) -> FakeEngine:
        return await super().spawn(name, incarnation)

    async def engines(self, run: Any) -> tuple[EngineHandle, ...]:
        gpus = {"engine-0": ("1",), "engine-1": ("2", "3")}
        return tuple(
            each.model_copy(update={"gpus": gpus[each.name]}) for each in await super().engines(run)
        )

    def client(self, url: str) -> ReceivingClient:
        known = super().client(url)
        return ReceivingClient(known.engine, self.script)

    def send(self) -> None:
        """Give the trainer a broadcasting side."""
        trainer: Any = self.live_trainer

        async def offer_weights(token: FenceToken, version: int) -> WeightsOffer:
            weights = WeightsRef(
                version=version, path="", digest=weights_digest(checksums_of(version)),
                checksum="fingerprint", transport="nccl", num_buckets=BUCKETS,
                num_tensors=2, num_bytes=16, dtype="bfloat16",
            )  # fmt: skip
            return WeightsOffer(weights=weights)

        async def open_channel(
            token: FenceToken, engines: tuple[EngineHandle, ...], timeout_s: float
        ) -> WeightChannel:
            members = tuple((each.name, each.incarnation) for each in engines)
            if members != self.members or not self.connected:
                self.members, self.connected = members, False
                self.numbers += 1
            return WeightChannel(
                name=f"g{self.numbers}", address="127.0.0.1", port=1, world=4, backend="nccl",
                connected=self.connected,
            )  # fmt: skip

        async def connect_channel(token: FenceToken, name: str) -> None:
            await self.script.play(f"connect {name}")
            self.connected = True

        async def broadcast_bucket(token: FenceToken, version: int, index: int, name: str) -> None:
            try:
                await self.script.play(f"broadcast {index} {name}")
            except ServiceUnreachable:
                self.connected = False
                raise

        async def pack_bucket(token: FenceToken, version: int, index: int) -> WeightBucket:
            return WeightBucket(version=version, index=index, tensors=TENSORS, num_bytes=8)

        async def drop_bucket(token: FenceToken) -> None:
            self.script.log.append("drop")

        for call in (
            offer_weights, open_channel, connect_channel, broadcast_bucket, pack_bucket,
            drop_bucket,
        ):  # fmt: skip
            setattr(trainer, call.__name__, call)


@pytest.fixture
async def bench(tmp_path: Path) -> PublicationBench:
    document = async_document(tmp_path, "barrier", engine="sglang")
    document["core"]["publication_transport"] = "nccl"
    document["placement"] = {"mode": "disaggregated"}
    fleet = BroadcastFleet()
    site = Site(fleet=fleet, tracker=ListTracker(), engine=fleet.client, router=fleet.router_client)
    made = await publication_bench(fleet, document, site)
    fleet.send()
    return made


def seen(bench: PublicationBench, *words: str) -> list[str]:
    return [call for call in bench.log if call.split()[0] in words]


async def test_a_group_is_made_once_and_used_again(bench: PublicationBench) -> None:
    report = await bench.publish(0)
    assert (report.transport, report.num_buckets) == ("nccl", BUCKETS)
    # Ranks: the trainer 0, engine-0 1, engine-1 2 and 3.
    assert sorted(seen(bench, "join")) == ["join engine-0 1/4", "join engine-1 2/4"]
    assert seen(bench, "connect") == ["connect g1"]
    assert seen(bench, "broadcast", "drop") == ["broadcast 0 g1", "broadcast 1 g1", "drop"]
    assert sorted(seen(bench, "receive")) == [
        "receive engine-0 0", "receive engine-0 None", "receive engine-1 0",
        "receive engine-1 None",
    ]  # fmt: skip
    del bench.log[:]
    await bench.publish(1)
    assert seen(bench, "join", "connect") == []
    assert seen(bench, "broadcast") == ["broadcast 0 g1", "broadcast 1 g1"]


async def test_a_broadcast_that_ends_in_nothing_replaces_the_group(
    bench: PublicationBench,
) -> None:
    await bench.publish(0)
    del bench.log[:]
    bench.fleet.script.fail("broadcast 1 g1", ServiceUnreachable("no end of a broadcast"))
    report = await bench.publish(1)
    assert sorted(each.engine for each in report.replaced) == ["engine-0", "engine-1"]
    assert {each.phase for each in report.replaced} == {"load"}
    assert seen(bench, "connect") == ["connect g2"]
    assert seen(bench, "broadcast") == [
        "broadcast 0 g1", "broadcast 1 g1", "broadcast 0 g2", "broadcast 1 g2",
    ]  # fmt: skip
    assert [engine.version for engine in bench.fleet.engine_list] == [1, 1]


async def test_an_engine_that_refuses_keeps_its_own_words(bench: PublicationBench) -> None:
    await bench.publish(0)
    words = ContractViolation("The full weights of the ModelRunner are partially updated")
    bench.fleet.script.fail("receive engine-1 None", words)
    report = await bench.publish(1)
    assert [(each.engine, each.error) for each in report.replaced] == [
        ("engine-1", words.message),
    ]
    # The survivor went into a group with the replacement.
    assert bench.fleet.numbers == 2  # type: ignore[attr-defined]
    assert [engine.version for engine in bench.fleet.engine_list] == [1, 1]


async def test_nobody_starts_an_engine_beside_a_bucket_that_was_offered(
    bench: PublicationBench,
) -> None:
    """It would count on the memory that the trainer gives up later."""
    await bench.publish(0)
    del bench.log[:]
    for engine in bench.fleet.engine_list:
        engine.paused, engine.mark = True, "released:kv_cache,weights"
    bench.fleet.script.fail("wake engine-1", ServiceUnreachable("no answer"))
    report = await bench.publish(1)
    assert [(each.engine, each.phase) for each in report.replaced] == [("engine-1", "wake")]
    assert seen(bench, "drop", "replace", "broadcast") == [
        "drop", "replace engine-1", "broadcast 0 g2", "broadcast 1 g2", "drop",
    ]  # fmt: skip


async def test_engines_that_never_meet_are_lost(bench: PublicationBench) -> None:
    for name in ("connect g1", "connect g2"):
        bench.fleet.script.fail(name, ServiceUnreachable("engines did not come"))
    with pytest.raises(EngineLost, match="publication of version 0: engines did not come"):
        await bench.publish(0)
