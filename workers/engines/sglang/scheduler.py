"""SGLang's scheduler process, with a weights checker whose checksums name what the files name.

SGLang's own checksums are of the tensors as it keeps them, by a hash that differs between CPU and
GPU: no trainer could tell beforehand what an engine must answer.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workers.engines.sglang.live_weights import Tensors, xxh3_checksums
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
    from sglang.srt.utils.weight_checker import WeightChecker

    config = json.loads((Path(server_args.model_path) / "config.json").read_bytes())

    others = WeightChecker.handle

    def handle(checker: Any, action: str, *arguments: Any, **named: Any) -> Any:
        hashed = CHECKSUMS.get(action)
        if hashed is None:
            return others(checker, action, *arguments, **named)
        return _answer(checker, config, hashed)

    WeightChecker.handle = handle
    run_scheduler_process(server_args, *arguments, **named)


def _answer(
    checker: Any, config: Mapping[str, Any], hashed: Callable[[Tensors], dict[str, str]]
) -> dict[str, Any]:
    """Answer of ``/weights_checker`` to an action of ``CHECKSUMS``, of this process.

    What it raises is answered as a failure with its text.
    """
    place = checker._parallelism_info()
    if place.pp_size > 1:
        raise RuntimeError(f"layers spread over {place.pp_size} stages cannot be confirmed")
    parameters = checker._get_model().named_parameters()
    checksums = whole_checksums(parameters, config, server_group(), hashed)
    whole = hashlib.sha256()
    for name in sorted(checksums):
        whole.update(f"{name} {checksums[name]}\n".encode())
    return {
        "checksums": checksums,
        "per_gpu_checksum": whole.hexdigest(),
        "parallelism_info": place.model_dump(),
    }
