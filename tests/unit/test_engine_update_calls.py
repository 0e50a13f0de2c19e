"""The calls that one engine's update takes: none of them is made twice."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from activities.loading import EngineUpdate, LoadOrder, Phase
from activities.site import Site
from activities.waking import Waking
from activities.wire.client import EngineClient
from activities.wire.digest import weights_digest
from models.errors import ContractViolation, DigestMismatch, ServiceUnreachable
from models.ids import FenceToken, RunRef
from models.ports import EngineHandle
from models.publication import WeightsRef
from tests.support.brittle_engine import BrittleEngine

CHECKSUMS = {"a.weight": "00000000000000aa", "b.weight": "00000000000000bb"}
ENGINE = EngineHandle(name="engine-0", url="http://engine:1", incarnation=0)
WAKE = [
    *("/model_info", "/pause_generation", "/update_weight_version"),
    *("/resume_memory_occupation", "/update_weight_version"),
]
LOAD = ["/update_weights_from_disk"]
VERIFY = ["/model_info", "/weights_checker"]
RESUME = ["/continue_generation"]


class Rig:
    """One engine, and what is asked of it."""

    def __init__(self, root: Path) -> None:
        self.engine = BrittleEngine()
        self.engine._routes["/weights_checker"] = lambda _: {
            "success": True,
            "ranks": [{"checksums": CHECKSUMS}],
        }
        self.paths: list[str] = []
        self.site = cast("Site", SimpleNamespace(engine=self.client))
        self.run = RunRef(run_id="train/x", root=str(root), spec_sha256="")

    def client(self, url: str) -> EngineClient:
        return EngineClient(url, transport=httpx.MockTransport(self._handle))

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        return await self.engine.handle(request)

    async def update(
        self,
        version: int,
        checksums: dict[str, str] = CHECKSUMS,
        waking: Waking | None = None,
    ) -> EngineUpdate:
        weights = WeightsRef(
            version=version, path="/weights", digest=weights_digest(checksums),
            num_tensors=2, num_bytes=8, dtype="bfloat16",
        )  # fmt: skip
        order = LoadOrder(self.run, FenceToken(epoch=1, update=0, attempt=1), weights, 30.0)
        async with aclosing(EngineUpdate(self.site, order, ENGINE, waking)) as update:
            for phase in Phase:
                await update.take(phase)
        return update


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def test_an_engine_that_serves(rig: Rig) -> None:
    update = await rig.update(1)
    assert not update.repeated
    assert rig.paths[:-3] == ["/model_info", "/pause_generation", "/flush_cache", *LOAD]
    assert sorted(rig.paths[-3:-1]) == VERIFY
    assert rig.paths[-1:] == RESUME
    assert (rig.engine.version, rig.engine.gate_closed, rig.engine.died) == ("1", False, None)


async def test_an_engine_that_gave_its_memory_back(rig: Rig) -> None:
    async with aclosing(rig.client("http://engine:1")) as client:
        await client.pause("abort")
        await client.release_memory(["kv_cache", "weights"])
    del rig.paths[:]
    await rig.update(1)
    assert rig.paths[:-3] == [*WAKE, *LOAD]
    assert sorted(rig.paths[-3:-1]) == VERIFY
    assert rig.paths[-1:] == RESUME
    assert (rig.engine.version, rig.engine.gate_closed, rig.engine.died) == ("1", False, None)


async def test_an_engine_that_was_woken_beforehand(rig: Rig) -> None:
    async with aclosing(rig.client("http://engine:1")) as client:
        await client.pause("abort")
        await client.release_memory(["kv_cache", "weights"])
    del rig.paths[:]
    waking = Waking(rig.site, ENGINE)
    await waking.begin(30.0)
    assert rig.paths == WAKE
    await rig.update(1, waking=waking)
    assert rig.paths[:-3] == [*WAKE, *LOAD]
    assert sorted(rig.paths[-3:-1]) == VERIFY
    assert (rig.engine.version, rig.engine.gate_closed, rig.engine.died) == ("1", False, None)


async def test_an_engine_that_does_not_wake_in_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def handle(request: httpx.Request) -> httpx.Response:
        await never.wait()
        raise AssertionError

    monkeypatch.setattr(rig, "_handle", handle)
    waking = Waking(rig.site, ENGINE)
    await waking.begin(0.05)
    with pytest.raises(ServiceUnreachable, match=r"engine-0 at http.* not awake within 0.05 s"):
        await rig.update(1, waking=waking)


async def test_an_engine_that_serves_these_weights_already(rig: Rig) -> None:
    rig.engine.version = "3"
    update = await rig.update(3)
    assert update.repeated
    assert rig.paths == [*VERIFY, *RESUME]


async def test_other_weights_and_other_versions_are_refused(rig: Rig) -> None:
    with pytest.raises(DigestMismatch, match="weights of version 1 have digest"):
        await rig.update(1, CHECKSUMS | {"b.weight": "00000000000000bc"})
    update_of = rig.engine._routes["/update_weights_from_disk"]

    def forgetful(body: dict[str, Any]) -> Any:
        return update_of(json.loads(json.dumps(body)) | {"weight_version": "8"})

    rig.engine._routes["/update_weights_from_disk"] = forgetful
    with pytest.raises(ContractViolation, match="serves version 8 after loading version 2"):
        await rig.update(2)
    assert rig.engine.gate_closed
