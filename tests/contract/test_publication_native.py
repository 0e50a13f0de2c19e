"""Publication to real native engines: bytes are proved, tokens are those of the new weights."""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from activities.loading import LoadOrder, load_engine
from activities.storage import layout
from activities.wire.digest import weights_digest
from activities.wire.router_contract import GROUP_HEADER, GroupTag
from models.errors import DigestMismatch
from models.ports import EngineHandle
from tests.support.native_fleet import NativeFleet, prepared, weights_of
from tests.support.publication_bench import (
    async_document,
)
from tests.support.router_rig import router_process
from workers.engines.process import ServerCommand, ServerProcess

DEADLINE_S = 50.0
PROMPTS = [[1, 40, 41, 42], [1, 99], [1, *range(60, 90)], [1, 7, 7, 7, 200, 201, 202, 203]]
NEW_TOKENS = 24


async def test_one_wrong_element_of_any_tensor_fails_the_publication(
    engine: Any, native_url: str, tmp_path: Path
) -> None:
    honest = weights_of(engine.folders[1], 1)
    fleet = NativeFleet([native_url])
    bench = await prepared(fleet, async_document(tmp_path / "run", num_engines=1))
    tensors = load_file(engine.folders[1] / "model.safetensors")
    names = sorted(tensors)[:: len(tensors) // 12][:12]
    assert len(names) == 12
    folder = tmp_path / "perturbed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(engine.config))
    fleet.exporting(honest.model_copy(update={"path": str(folder)}))
    for name in names:
        changed = dict(tensors)
        changed[name] = tensors[name].clone()
        changed[name].view(-1)[0] += 1e-3
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(DigestMismatch, match="weights of version 1 have digest"):
            await bench.publish(1)
        assert fleet.live_producer.publishing == 1
        assert fleet.live_router.routable() == []
    with pytest.raises(TimeoutError):  # it holds calls back, and answers none with such weights
        await asyncio.wait_for(engine.generate(), 0.5)
    save_file(tensors, folder / "model.safetensors")
    report = await bench.publish(1)
    assert [each.digest for each in report.engines] == [honest.digest]
    assert fleet.live_router.routable() == ["engine-0"]


async def test_greedy_tokens_after_a_publication_are_those_of_the_trainers_own_decode(
    engine: Any, native_url: str, tmp_path: Path
) -> None:
    fleet = NativeFleet([native_url])
    bench = await prepared(fleet, async_document(tmp_path, num_engines=1))
    answers = {}
    for version, folder in enumerate(engine.folders):
        fleet.exporting(weights_of(folder, version))
        await bench.publish(version)
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NEW_TOKENS}
        calls = [
            engine.http.post("/generate", json={"input_ids": ids, "sampling_params": sampling})
            for ids in PROMPTS
        ]
        bodies = [answer.json() for answer in await asyncio.gather(*calls)]
        assert {body["meta_info"]["weight_version"] for body in bodies} == {str(version)}
        answers[version] = [body["output_ids"] for body in bodies]
        assert answers[version] == [greedy(folder, ids) for ids in PROMPTS]
    assert answers[0] != answers[1]


@torch.no_grad()
def greedy(folder: Path, prompt: list[int]) -> list[int]:
    """The most likely continuation by transformers, without a cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture
async def engine_urls(
    native_folders: tuple[Path, Path], tmp_path: Path
) -> AsyncIterator[list[str]]:
    """Two engine processes of the test's own."""
    async with AsyncExitStack() as stack:
        urls = []
        for rank in range(2):
            command = ServerCommand(
                name=f"engine-{rank}",
                argv=(
                    *(sys.executable, "-m", "workers.engines.native", "--dtype", "float32"),
                    *("--model-path", str(native_folders[0])),
                    *("--ready-file", str(tmp_path / f"engine-{rank}.json")),
                ),
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                log_path=tmp_path / f"engine-{rank}.log",
                ready_file=tmp_path / f"engine-{rank}.json",
            )
            server = await ServerProcess.start(command, DEADLINE_S)
            stack.push_async_callback(server.stop, 5.0)
            urls.append(server.url)
        yield urls


@dataclass
class Load:
    """Calls through the router, group after group, until told to stop."""

    url: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    groups: list[tuple[set[int], set[str]]] = field(default_factory=list)
    """Of each finished group of two: policy versions, finish reasons."""

    async def run(self, client: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S) as http:
            for number in itertools.count():
                if self.over.is_set():
                    return
                await self._group(http, f"client-{client}-group-{number}")

    async def _group(self, http: httpx.AsyncClient, group: str) -> None:
        sampling = {"max_new_tokens": 60, "ignore_eos": True}
        headers = {GROUP_HEADER: GroupTag(group, 0, 2).header()}
        calls = [
            http.post(
                "/generate",
                json={
                    "rid": f"{group}-{sibling}",
                    "input_ids": PROMPTS[0],
                    "sampling_params": sampling,
                },
                headers=headers,
            )
            for sibling in range(2)
        ]
        answers = await asyncio.gather(*calls)
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        metas = [answer.json()["meta_info"] for answer in answers]
        versions = {int(meta["weight_version"]) for meta in metas}
        self.groups.append((versions, {meta["finish_reason"]["type"] for meta in metas}))


async def test_a_rolling_publication_under_load_costs_no_call(
    engine_urls: list[str], native_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Real engines, a real router, calls all the time: each group is of one version, and whole."""
    document = async_document(tmp_path / "run", "rolling", drain_timeout_s=DEADLINE_S)
    async with router_process(tmp_path) as router:
        fleet = NativeFleet(engine_urls, router)
        bench = await prepared(fleet, document)
        fleet.exporting(*(weights_of(folder, v) for v, folder in enumerate(native_folders)))
        await bench.publish(0)
        load = Load(router.url)
        clients = [asyncio.create_task(load.run(number)) for number in range(4)]
        await router.until(lambda state: all(each.active_calls for each in state.engines))
        report = await asyncio.wait_for(bench.publish(1), DEADLINE_S)
        published = len(load.groups)
        async with asyncio.timeout(DEADLINE_S):
            while len(load.groups) < published + 8:
                await asyncio.sleep(0.02)
        load.over.set()
        await asyncio.gather(*clients)
    assert report.replaced == ()
    versions, reasons = zip(*load.groups, strict=True)
    assert all(len(each) == 1 for each in versions), "a group saw two policies"
    assert set.union(*reasons) == {"length"}
    assert set.union(*versions) == {0, 1}
    assert set.union(*versions[-4:]) == {1}
    events = [row["event"] for row in bench.rows(layout.ROLLING_PUBLICATION)]
    assert events.count("engine_reopened") == 2
    assert "engine_unavailable" not in events


async def test_the_version_alone_proves_nothing(
    engine: Any, native_url: str, tmp_path: Path
) -> None:
    """Other bytes under the right version are found and loaded over."""
    fleet = NativeFleet([native_url])
    bench = await prepared(fleet, async_document(tmp_path, num_engines=1))
    exported = weights_of(engine.folders[1], 1)
    order = LoadOrder(bench.run, bench.token(1), exported, DEADLINE_S)
    handle = EngineHandle(name="engine-0", url=native_url, incarnation=0)
    await load_engine(fleet.site(), order, handle)
    again = await load_engine(fleet.site(), order, handle)
    assert (again.version, again.digest) == (1, exported.digest)
    update = {"model_path": str(engine.folders[0]), "weight_version": "1"}
    assert (await engine.http.post("/update_weights_from_disk", json=update)).status_code == 200
    await load_engine(fleet.site(), order, handle)
    assert weights_digest(await engine.checksums()) == exported.digest
