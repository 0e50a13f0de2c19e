r"""Seconds that ranks need to write a trainer's state and to read it again, by size of the model.

    python benchmarks/checkpoint_parts.py --ranks 2 --folder parts

Every rank is a process of this host; weights are random, the optimizer has stepped once with random
gradients. A round writes with digests, as a trainer does, then reads into the same model; rounds
take turns over the sizes. Both times are from the moment that all ranks are ready until the last
one has done it, so they hold its flush to the disk; what is read was written shortly before.
Memory is what a rank's highest resident size grew by in the first round.
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.checkpoint import PolicyClock
from workers.trainers.process_ranks import join_ranks
from workers.trainers.ranks import Ranks, SingleRank
from workers.trainers.sharded import shard
from workers.trainers.state import TrainerState, read_state, write_state

SIZES = {
    "0.3M": {"hidden_size": 96, "num_hidden_layers": 2, "vocab_size": 512},
    "100M": {"hidden_size": 768, "num_hidden_layers": 10, "vocab_size": 32_768},
}
"""About so many parameters, the head tied."""
MEET_S = 300.0


def main() -> None:
    """Start the ranks and print what the first one measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder, removed again")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_measure, args=(rank, arguments)) for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    shutil.rmtree(arguments.folder)
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


def _measure(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = arguments.ranks
    ranks: Ranks = SingleRank()
    if world > 1:
        ranks = join_ranks(arguments.folder / "meet", rank, world, MEET_S)
    trainers = {name: _trainer(sizes, ranks) for name, sizes in SIZES.items()}
    state = TrainerState(clock=PolicyClock(completed_steps=1, published_step=0, next_rollout_id=1))
    seconds: dict[str, dict[str, list[float]]] = {name: {"write": [], "read": []} for name in SIZES}
    grown = dict.fromkeys(SIZES, 0)
    for index in range(arguments.rounds):
        for name, (model, optimizer) in trainers.items():
            folder = arguments.folder / f"{name}-{index}"
            before = _peak()
            started = _together(ranks)
            write_state(folder, model, optimizer, state, ranks)
            seconds[name]["write"].append(_together(ranks) - started)
            started = _together(ranks)
            read_state(folder, model, optimizer, ranks)
            seconds[name]["read"].append(_together(ranks) - started)
            grown[name] = grown[name] or _peak() - before
            ranks.exchange("")
            if rank == 0:
                shutil.rmtree(folder)
    if rank == 0:
        for name, (model, _) in trainers.items():
            report: dict[str, Any] = {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "ranks": world,
                **{key: round(statistics.median(each), 3) for key, each in seconds[name].items()},
                "write_all": [round(each, 3) for each in seconds[name]["write"]],
                "read_all": [round(each, 3) for each in seconds[name]["read"]],
                "grown_mb": round(grown[name] / 1e6),
            }
            sys.stdout.write(json.dumps({"model": name} | report) + "\n")


def _trainer(sizes: dict[str, int], ranks: Ranks) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = Qwen3Config(
        intermediate_size=3 * sizes["hidden_size"],
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=sizes["hidden_size"] // 6,
        tie_word_embeddings=True,
        **sizes,
    )
    model = Qwen3ForCausalLM(config)
    if ranks.world > 1:
        shard(model, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _together(ranks: Ranks) -> float:
    ranks.exchange("")
    return time.perf_counter()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
