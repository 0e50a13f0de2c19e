"""Weights that an engine takes from another process's memory, bucket by bucket."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from activities.wire.client import EngineClient
from activities.wire.contract import InitWeightsUpdateGroup
from activities.wire.digest import weights_digest
from models.errors import ContractViolation
from models.ports import EngineHandle
from models.publication import CPU
from tests.support.served_engine import ServedEngine
from workers.trainers.buckets import WireWeights
from workers.trainers.channel import Channel
from workers.trainers.handles import SharedMemory

DEADLINE_S = 60.0
NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""As a trainer process has it: its memory must be the kind that SGLang's processes take."""


def weights_of(folder: Path, device: str, dtype: torch.dtype) -> WireWeights:
    """The tensors of a model folder, as a trainer would hold them."""
    tensors = {
        name: tensor.to(device, torch.float32)
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return WireWeights(tensors, "", dtype)


async def test_buckets_bring_the_weights_of_a_folder_without_it(
    any_engine: ServedEngine, tmp_path: Path
) -> None:
    on_gpu = any_engine.kind == "sglang" and torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    async with aclosing(EngineClient(str(any_engine.http.base_url))) as client:
        for version, folder in ((17, any_engine.folders[1]), (18, any_engine.folders[0])):
            weights = weights_of(folder, device, any_engine.dtype)
            plans = weights.plan(limit_bytes=30_000)
            assert len(plans) > 2, "the update is made of several calls"
            await client.pause("abort")
            before = (await client.model_info())["weight_version"]
            for number, plan in enumerate(plans):
                assert (await client.model_info())["weight_version"] == before
                last = number == len(plans) - 1
                memory = SharedMemory(plan.num_bytes, weights.device, lambda _: tmp_path / "bucket")
                weights.pack(plan, memory.data)
                place = "0" if on_gpu else CPU
                await client.update_weights_from_tensor(
                    {place: memory.handle(plan.tensors)},
                    [place],
                    version if last else None,
                    DEADLINE_S,
                    flush_cache=last,
                )
                # The engine has copied what it was shown.
                memory.data.zero_()
                memory.close()
            assert (await client.model_info())["weight_version"] == str(version)
            by_file = await client.checksums()
            assert weights_digest(await client.checksums("fingerprint")) == weights.digest()
            await client.update_weights_from_disk(str(folder), version, DEADLINE_S)
            assert await client.checksums() == by_file
            await client.resume()


async def test_buckets_are_broadcast_to_an_engine(
    any_engine: ServedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice through one group; the native engine has no such call and says so."""
    url = str(any_engine.http.base_url)
    on_gpu = any_engine.kind == "sglang" and torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU: NCCL refuses two ranks on one")
    for name, value in NCCL.items():
        monkeypatch.setenv(name, value)
    channel = Channel([EngineHandle(name="engine-0", url=url, incarnation=0)], DEADLINE_S)
    info = channel.info
    group = InitWeightsUpdateGroup(
        master_address=info.address,
        master_port=info.port,
        rank_offset=1,
        world_size=info.world,
        group_name=info.name,
        backend=info.backend,
    )
    async with aclosing(EngineClient(url)) as client:
        if any_engine.kind == "native":
            with pytest.raises(ContractViolation, match="404"):
                await client.init_weights_update_group(group)
            return
        joining = asyncio.create_task(client.init_weights_update_group(group))
        await asyncio.to_thread(channel.connect)
        await joining
        for version, folder in ((27, any_engine.folders[1]), (28, any_engine.folders[0])):
            weights = weights_of(folder, "cuda:1" if on_gpu else "cpu", any_engine.dtype)
            plans = weights.plan(limit_bytes=30_000)
            await client.pause("abort")
            for number, plan in enumerate(plans):
                last = number == len(plans) - 1
                memory = SharedMemory(plan.num_bytes, weights.device, lambda _: tmp_path / "bucket")
                weights.pack(plan, memory.data)
                sending = asyncio.to_thread(channel.broadcast, memory.data)
                taking = client.update_weights_from_distributed(
                    info.name,
                    plan.tensors,
                    version if last else None,
                    DEADLINE_S,
                    flush_cache=last,
                )
                await asyncio.gather(sending, taking)
            assert (await client.model_info())["weight_version"] == str(version)
            assert weights_digest(await client.checksums("fingerprint")) == weights.digest()
            await client.resume()
    channel.close()


async def test_a_handle_for_another_gpu_is_not_sent(any_engine: ServedEngine) -> None:
    async with aclosing(EngineClient(str(any_engine.http.base_url))) as client:
        await client.pause("abort")
        with pytest.raises(ContractViolation, match="it computes on 3, the weights lie on 0, 1"):
            await client.update_weights_from_tensor({"0": "", "1": ""}, ["3"], 1, DEADLINE_S)
        await client.resume()
        assert await client.health(timeout_s=DEADLINE_S)


async def test_the_native_engine_makes_nothing_of_a_handle_but_tensors(
    native_url: str,
) -> None:
    """A payload that names another function is refused, and the engine lives."""
    payload = "gASVHQAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjARleGl0lIWUUpQu"  # posix.system("exit")
    async with aclosing(EngineClient(native_url)) as client:
        await client.pause("abort")
        with pytest.raises(ContractViolation, match=r"posix\.system is not part of a handle"):
            await client.update_weights_from_tensor({CPU: payload}, [CPU], 1, DEADLINE_S)
        await client.resume()
        assert await client.health()
