"""SGLang's scheduler process, with a weights checker whose checksums name what the files name.

SGLang's own checksums are of the tensors as it keeps them, by a hash that differs between CPU and
GPU: no trainer could tell beforehand what an engine must answer.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.engines.sglang.live_weights import xxh3_checksums
from workers.engines.sglang.tensor_parallel import server_group, whole_checksums


def run_scheduler(server_args: Any, *arguments: Any, **named: Any) -> None:
    """``run_scheduler_process`` of SGLang, same arguments."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.utils.weight_checker import WeightChecker

    config = json.loads((Path(server_args.model_path) / "config.json").read_bytes())

    def compute_checksum(checker: Any) -> dict[str, Any]:
        return _answer(checker, config)

    WeightChecker._compute_checksum = compute_checksum
    run_scheduler_process(server_args, *arguments, **named)


def _answer(checker: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Answer of ``/weights_checker`` with ``{"action": "checksum"}``, of this process.

    What it raises is answered as a failure with its text.
    """
    place = checker._parallelism_info()
    if place.pp_size > 1:
        raise RuntimeError(f"layers spread over {place.pp_size} stages cannot be confirmed")
    parameters = checker._get_model().named_parameters()
    checksums = whole_checksums(parameters, config, server_group(), xxh3_checksums)
    whole = hashlib.sha256()
    for name in sorted(checksums):
        whole.update(f"{name} {checksums[name]}\n".encode())
    return {
        "checksums": checksums,
        "per_gpu_checksum": whole.hexdigest(),
        "parallelism_info": place.model_dump(),
    }
