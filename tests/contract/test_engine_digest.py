"""An engine names the bytes of its live weights as the files of the model name them."""

from contextlib import aclosing
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from activities.wire.client import EngineClient
from tests.support.served_engine import ServedEngine
from workers.sources.tensor_file import bytes_of

DEADLINE_S = 60.0


def checksums_of(folder: Path, dtype: torch.dtype) -> dict[str, str]:
    """Name -> xxh3_64 of every tensor in the folder's files, as an engine of ``dtype`` has it."""
    found: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                tensor = file.get_tensor(name)
                found[name] = xxhash.xxh3_64_hexdigest(bytes_of(tensor, dtype))
    return found


async def test_live_checksums_are_those_of_the_files_before_and_after_an_update(
    any_engine: ServedEngine,
) -> None:
    first, second = any_engine.folders
    assert checksums_of(first, any_engine.dtype) != checksums_of(second, any_engine.dtype)
    async with aclosing(EngineClient(str(any_engine.http.base_url))) as client:
        for version, folder in ((7, second), (8, first)):
            await client.pause("abort")
            await client.update_weights_from_disk(str(folder), version, DEADLINE_S)
            assert await client.checksums() == checksums_of(folder, any_engine.dtype)
            await client.resume()
