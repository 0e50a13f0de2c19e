"""What a copy of the weights on the host costs beside the folder that it may become.

    python benchmarks/host_copy.py --folder /dev/shm/host-copy
    python benchmarks/host_copy.py --folder parts --device cpu --size tiny --rounds 3

A fully async run copies its weights to the host after every publication; a folder is written only
when an engine is replaced. Models have random weights and the sizes of SmolLM2-135M and Qwen3-0.6B,
float32 as a trainer holds them, cast to bfloat16. Each round takes a copy, writes a folder from it
and writes one from the model, in turns; the first round, in which the memory is locked, is told
apart. Rates count bytes of the copy.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from workers.trainers.host_copy import WeightsCopy
from workers.trainers.ranks import SingleRank
from workers.trainers.weights import export_weights

SIZES: dict[str, tuple[type[LlamaConfig] | type[Qwen3Config], dict[str, Any]]] = {
    "tiny": (
        LlamaConfig,
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
    ),
    "smollm2-135m": (
        LlamaConfig,
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
        },
    ),
    "qwen3-0.6b": (
        Qwen3Config,
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
        },
    ),
}


def main() -> None:
    """Measure the sizes that are asked for, a line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="a new folder, removed again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["smollm2-135m", "qwen3-0.6b"])
    parser.add_argument("--rounds", type=int, default=9)
    told = parser.parse_args()
    told.folder.mkdir(parents=True)
    try:
        for size in told.size:
            found = _measure(size, told.device, told.rounds, told.folder)
            sys.stdout.write(json.dumps({"model": size, "device": told.device} | found) + "\n")
    finally:
        shutil.rmtree(told.folder)


def _measure(size: str, device: str, rounds: int, folder: Path) -> dict[str, float]:
    kind, sizes = SIZES[size]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(kind(tie_word_embeddings=True, **sizes))
    companions, target = folder / "prepared", folder / "written"
    model.config.save_pretrained(companions)
    copy = WeightsCopy(model, SingleRank(), torch.bfloat16)
    ways: dict[str, Callable[[], object]] = {
        "copy": copy.take,
        "folder_of_copy": lambda: copy.write(companions, target),
        "folder_of_model": lambda: export_weights(model, companions, 0, target, torch.bfloat16),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
            shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(companions)
    first = seconds["copy"][0]
    median = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    return {
        "mb": round(copy.num_bytes / 1e6, 1),
        "first_copy_s": round(first, 4),
        **{f"{name}_s": round(each, 4) for name, each in median.items()},
        "copy_gb_per_s": round(copy.num_bytes / median["copy"] / 1e9, 2),
        "copy_over_folder": round(median["copy"] / median["folder_of_model"], 4),
    }


if __name__ == "__main__":
    main()
