"""SGLang's scheduler process, with checksums that name what files name, and a loader of its own.

SGLang's own checksums are of the tensors as it keeps them, by a hash that differs between CPU and
GPU: no trainer could tell beforehand what an engine must answer. The loader is ``direct_load``.
Memory is given back when the GPU has done its work, see ``idle_first``.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from workers.engines.sglang.direct_load import DirectLoad
from workers.engines.sglang.live_weights import Tensors, parameters_of, xxh3_checksums
from workers.engines.sglang.tensor_parallel import server_group, whole_checksums
from workers.fingerprint import fingerprints

CHECKSUMS: Mapping[str, Callable[[Tensors], dict[str, str]]] = {
    "checksum": xxh3_checksums,
    "fingerprint": fingerprints,
}
"""Action of ``/weights_checker`` -> the hash of every tensor's bytes, by name."""


def run_scheduler(server_args: Any, *arguments: Any, **named: Any) -> None:
    """``run_scheduler_process`` of SGLang, same arguments."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Memory,
    )
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils.weight_checker import WeightChecker

    config = json.loads((Path(server_args.model_path) / "config.json").read_bytes())

    others = WeightChecker.handle

    def handle(checker: Any, action: str, *arguments: Any, **named: Any) -> Any:
        hashed = CHECKSUMS.get(action)
        if hashed is None:
            return others(checker, action, *arguments, **named)
        return _answer(checker, config, hashed)

    WeightChecker.handle = handle
    WeightUpdater._update_weights_from_flattened_bucket = _bucket_loader(config)
    Memory.release_memory_occupation = idle_first(Memory.release_memory_occupation)
    run_scheduler_process(server_args, *arguments, **named)


def idle_first(release: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``release``, a ``release_memory_occupation``, once the device has computed all it was given.

    SGLang 0.5.18 makes sure that no request is left, but a batch of requests that have ended may
    still be computed: memory that is unmapped under it is an illegal access, which ends the server
    (https://github.com/sgl-project/sglang/pull/31073).
    """

    @wraps(release)
    def wait(updater: Any, request: Any) -> Any:
        torch.get_device_module().synchronize()
        return release(updater, request)

    return wait


def _bucket_loader(config: Mapping[str, Any]) -> Callable[[Any, dict[str, Any]], tuple[bool, str]]:
    """A ``WeightUpdater._update_weights_from_flattened_bucket``; the answer is as SGLang's own."""
    loads: list[DirectLoad] = []

    def load(updater: Any, flattened_tensor_bucket_dict: dict[str, Any]) -> tuple[bool, str]:
        if not loads:
            loads.append(DirectLoad(config, server_group().size))
        bucket = flattened_tensor_bucket_dict
        loads[0].load(updater.get_model(), bucket["flattened_tensor"], bucket["metadata"])
        return True, "Success"

    return load


def _answer(
    checker: Any, config: Mapping[str, Any], hashed: Callable[[Tensors], dict[str, str]]
) -> dict[str, Any]:
    """Answer of ``/weights_checker`` to an action of ``CHECKSUMS``, of this process.

    What it raises is answered as a failure with its text.
    """
    place = checker._parallelism_info()
    if place.pp_size > 1:
        raise RuntimeError(f"layers spread over {place.pp_size} stages cannot be confirmed")
    parameters = parameters_of(checker._get_model())
    checksums = whole_checksums(parameters, config, server_group(), hashed)
    whole = hashlib.sha256()
    for name in sorted(checksums):
        whole.update(f"{name} {checksums[name]}\n".encode())
    return {
        "checksums": checksums,
        "per_gpu_checksum": whole.hexdigest(),
        "parallelism_info": place.model_dump(),
    }
