"""An SGLang server whose model is cut over two processes confirms what the files hold.

Two GPUs, or on a machine without any two processes of one core each.
"""

import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
import xxhash
from safetensors import safe_open

from activities.wire.client import EngineClient
from tests.support.engine_model import CONFIG, GPU_SIZES, PROMPT, write_engine_model
from tests.support.sglang_server import NO_SGLANG, sees_gpu, sglang_python, sglang_server
from workers.fingerprint import fingerprints
from workers.sources.tensor_file import bytes_of

PYTHON = sglang_python()
DEADLINE_S = 60.0
NUM_GPUS = "import torch; print(torch.cuda.device_count())"
ARGUMENTS = {"tp_size": 2, "disable_custom_all_reduce": True}
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""Without it SGLang wants a NUMA node for each process."""
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PYTHON is None, reason=NO_SGLANG),
]


@dataclass(frozen=True, slots=True)
class Served:
    """A server and the folders that it may load."""

    url: str
    folders: tuple[Path, Path]
    dtype: torch.dtype


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    assert PYTHON is not None
    on_gpu, root = sees_gpu(PYTHON), tmp_path_factory.mktemp("tensor_parallel")
    if on_gpu and _num_gpus(PYTHON) < 2:
        pytest.skip("this machine has one GPU")
    folders = tuple(write_engine_model(root / f"v{n}", n, **GPU_SIZES) for n in (0, 1))
    told = {} if on_gpu else CORES
    with sglang_server(folders[0], root, more=ARGUMENTS, **told) as url:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        yield Served(url, (folders[0], folders[1]), dtype)


def _num_gpus(python: str) -> int:
    command = [python, "-c", NUM_GPUS]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
    return int(done.stdout)


async def greedy(url: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        answer = await http.post(f"{url}/generate", json=body)
        return list(answer.raise_for_status().json()["output_ids"])


def tensors_of(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What is in the files, as a server of ``dtype`` keeps it."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).to(dtype) for name in list(file.keys())}


async def test_two_processes_confirm_the_bytes_of_the_files(served: Served) -> None:
    first, second = served.folders
    async with aclosing(EngineClient(served.url, vocab_size=CONFIG["vocab_size"])) as client:
        assert (await client.server_info())["tp_size"] == 2
        greedily = []
        for version, folder in ((1, second), (2, first), (3, second)):
            await client.pause("abort")
            await client.update_weights_from_disk(str(folder), version, DEADLINE_S)
            assert (await client.model_info())["weight_version"] == str(version)
            found = await client.checksums()
            await client.resume()
            greedily.append(await greedy(served.url))
            tensors = tensors_of(folder, served.dtype)
            wanted = {
                name: xxhash.xxh3_64_hexdigest(bytes_of(tensor, tensor.dtype))
                for name, tensor in tensors.items()
            }
            assert found == wanted
            assert await client.checksums("fingerprint") == fingerprints(tensors.items())
    assert greedily[0] == greedily[2] != greedily[1]
    assert all(0 <= token < CONFIG["vocab_size"] for tokens in greedily for token in tokens)
