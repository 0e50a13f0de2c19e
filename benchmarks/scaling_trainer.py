r"""Trainers of 1, 2 and 4 ranks on one host: speed by rank, and whether they learn the same.

    python benchmarks/scaling_trainer.py --gpus 4 --out trainer.json
    python benchmarks/scaling_trainer.py --cpu --gpus 2 --out trainer.json      two ranks over gloo
    python benchmarks/scaling_trainer.py --gpus 2 --profile timelines --out trainer.json

Every trainer of W ranks takes ten updates of W times 16,384 tokens, in documents of one length, so
that no rank waits for another one's longer pack; a rank's share is one micro-batch. The model, its
random weights and how an update is timed are those of ``trainer_throughput.py``. The trainer of one
rank takes the updates of every other trainer as well: its losses are what theirs must equal.
Behavior log-probs are those of a uniform policy, so that truncated importance weights, and with
them the loss, move with the weights.

Trainers whose GPUs fit beside one another run at the same time. When one of the compiled trainers
fails, all are measured once more without compiling, as far as ``--budget-s`` allows.

Ranks begin an update together: making its collection is not part of it. Efficiency is tokens/s of
W ranks over W times those of one. With ``--profile`` every trainer takes one more update, whose
time line is printed for every rank (``step_timeline.py``); the traces stay in that folder.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WORLDS = (1, 2, 4)
UPDATES = 10
WARM_UP = 2
"""Of the ten: the first ones compile and allocate, and are not timed."""
DOCUMENTS = 8
"""Of one rank in one update."""
LEARNING_RATE, TINY_LEARNING_RATE = 1e-5, 1e-3
POLL_S = 0.2
MEET_S = 300.0
"""For ranks to come, and for a collective."""
_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What one rank does."""

    world: int
    rank: int
    scales: tuple[int, ...]
    """Updates of so many ranks' tokens, one trainer for each."""
    compiled: bool
    cpu: bool
    model: str
    folder: str
    """Of this trainer: rendezvous, contract files, result."""
    profile: str = ""
    """Where time lines go; none without."""


def main() -> None:
    """Measure all trainers, or be one rank of one of them."""
    if sys.argv[1:2] == ["rank"]:
        be_rank(Order(**json.loads(sys.argv[2])))
        return
    told = _arguments()
    rows = measure(told)
    for table in sorted(told.profile.glob("*.txt")) if told.profile else ():
        print(f"{table.stem}\n{table.read_text()}")
    told.out.write_text(json.dumps({"rows": rows, **about(told)}, indent=2) + "\n")
    if any("error" in row for row in rows):
        raise SystemExit("\n".join(row["error"] for row in rows if "error" in row))


def measure(told: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each trainer, compiled where that works."""
    deadline = time.monotonic() + told.budget_s
    worlds = [world for world in WORLDS if world <= told.gpus]
    with tempfile.TemporaryDirectory(prefix="perdure-scaling-") as scratch:
        model = _make_model(Path(scratch) / "model", cpu=told.cpu)
        ways = [False] if told.cpu or told.eager else [True, False]
        rows: list[dict[str, Any]] = []
        for compiled in ways:
            tried = []
            for wave in waves(worlds, told.gpus):
                folder = Path(scratch) / f"{'compiled' if compiled else 'eager'}-{wave[0]}"
                tried += run_wave(wave, folder, model, compiled, told, deadline)
            rows = tried if not rows or all("error" not in row for row in tried) else rows
            if all("error" not in row for row in rows) or time.monotonic() > deadline:
                break
    return compared(rows)


def waves(worlds: Sequence[int], gpus: int) -> Iterator[list[int]]:
    """``worlds``, in their order, in sets that fit on ``gpus`` GPUs at the same time."""
    wave: list[int] = []
    for world in worlds:
        if wave and sum(wave) + world > gpus:
            yield wave
            wave = []
        wave.append(world)
    yield wave


def run_wave(
    wave: Sequence[int],
    folder: Path,
    model: Path,
    compiled: bool,
    told: argparse.Namespace,
    deadline: float,
) -> list[dict[str, Any]]:
    """The trainers of ``wave`` at once; a row each, with ``error`` for one that failed."""
    first, started = 0, {}
    for world in wave:
        place = folder / str(world)
        place.mkdir(parents=True)
        visible = "" if told.cpu else ",".join(map(str, range(first, first + world)))
        scales = tuple(each for each in WORLDS if each <= told.gpus) if world == 1 else (world,)
        profile = str(told.profile.resolve()) if told.profile else ""
        common = (scales, compiled, told.cpu, str(model), str(place), profile)
        started[world] = [start_rank(Order(world, rank, *common), visible) for rank in range(world)]
        first += world
    return [finish(world, ranks, folder / str(world), deadline) for world, ranks in started.items()]


def start_rank(order: Order, visible: str) -> "subprocess.Popen[bytes]":
    """One process; its output goes to a file of its own."""
    threads = "1" if order.cpu else str(max(1, (os.cpu_count() or 1) // 8))
    environment = {**os.environ, **_ENVIRONMENT, "CUDA_VISIBLE_DEVICES": visible}
    with (Path(order.folder) / f"rank{order.rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, "rank", json.dumps(dataclasses.asdict(order))],
            env={**environment, "OMP_NUM_THREADS": threads},
            stdout=log,
            stderr=log,
        )


def finish(
    world: int, ranks: "Sequence[subprocess.Popen[bytes]]", folder: Path, deadline: float
) -> dict[str, Any]:
    """Wait for all ranks; the first one that fails, or the deadline, ends the others."""
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() not in (None, 0) for rank in ranks) or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    if any(codes):
        place = next(place for place, code in enumerate(codes) if code)
        words = (folder / f"rank{place}.log").read_text(errors="replace").splitlines()[-12:]
        lines = "\n".join(words)
        return {"world": world, "error": f"rank {place} of {world} ended {codes[place]}:\n{lines}"}
    if None in codes:
        return {"world": world, "error": f"{world} ranks: not done within the time that was left"}
    row: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return row


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` with efficiency and the distance of losses from those of one rank."""
    one = next((row for row in rows if row["world"] == 1 and "error" not in row), None)
    for row in rows:
        if one is None or "error" in row:
            continue
        world, own = row["world"], row["losses"][str(row["world"])]
        row["efficiency"] = row["tokens_per_s"] / (world * one["tokens_per_s"])
        pairs = zip(own, one["losses"][str(world)], strict=True)
        row["loss_gap"] = max(abs(a - b) for a, b in pairs)
        row["loss_moved"] = max(own) - min(own)
        norms = zip(row["norms"][str(world)], one["norms"][str(world)], strict=True)
        row["norm_gap"] = max(abs(a - b) / b for a, b in norms)
    return rows


def be_rank(order: Order) -> None:
    """Train once for every scale; the first rank tells."""
    import torch
    from trainer_throughput import PEAK_RATE, QWEN3_06B, TINY, update_operations

    from workers.trainers.process_ranks import join_ranks

    if order.cpu:
        torch.set_num_threads(1)
    ranks = None
    if order.world > 1:
        meeting = Path(order.folder) / "meeting"
        ranks = join_ranks(meeting, order.rank, order.world, MEET_S)
    shape, length, prompt = (TINY, 128, 8) if order.cpu else (QWEN3_06B, 2048, 128)
    found: dict[str, Any] = {"losses": {}, "norms": {}}
    for scale in order.scales:
        documents = [length] * (DOCUMENTS * scale)
        seconds, metrics = train(order, scale, documents, prompt, shape["vocab_size"], ranks)
        found["losses"][str(scale)] = [each["train/loss"] for each in metrics]
        found["norms"][str(scale)] = [each["train/grad_norm"] for each in metrics]
        if scale == order.world:
            took = statistics.median(seconds[WARM_UP:])
            rate = update_operations(shape, documents, prompt) / took / order.world
            found |= {
                "world": order.world,
                "compiled": order.compiled,
                "tokens": sum(documents),
                "seconds": took,
                "seconds_low": min(seconds[WARM_UP:]),
                "seconds_high": max(seconds[WARM_UP:]),
                "processor_seconds": statistics.median(
                    each["train/cpu_seconds"] for each in metrics[WARM_UP:]
                ),
                "first_update_seconds": seconds[0],
                "tokens_per_s": sum(documents) / took,
                "mfu": None if order.cpu else rate / PEAK_RATE,
                "peak_gib": metrics[-1].get("train/packing/rank0_peak_allocated_bytes", 0) / 2**30,
            }
    if order.rank == 0:
        Path(order.folder, "result.json").write_text(json.dumps(found))


def train(
    order: Order,
    scale: int,
    documents: Sequence[int],
    prompt: int,
    vocabulary: int,
    ranks: Any,
) -> tuple[list[float], list[dict[str, float]]]:
    """Ten updates of a new trainer: seconds and metrics of each."""
    import torch
    from step_timeline import observed
    from trainer_throughput import Lengths

    from workers.trainers.local import LocalTrainer

    lengths = Lengths(documents[0], documents[0], prompt)
    root = Path(order.folder) / f"run-{scale}"
    spec = run_spec(order, documents, lengths, root, vocabulary)
    trainer = LocalTrainer(spec, Path(order.model), ranks=ranks)
    seconds, metrics = [], []
    for _ in range(UPDATES):
        update = prepared(trainer, documents, lengths, vocabulary)
        started = time.perf_counter()
        metrics.append(update())
        seconds.append(time.perf_counter() - started)
    if order.profile and scale == order.world:
        place = Path(order.profile) / f"{order.world}-ranks-rank{order.rank}"
        update = prepared(trainer, documents, lengths, vocabulary)
        seen = observed(update, place.with_suffix(".json.gz"), gpu=not order.cpu)
        place.with_suffix(".txt").write_text(seen.table() + "\n")
    del trainer, update
    gc.collect()
    if not order.cpu:
        torch.cuda.empty_cache()
    return seconds, metrics


def prepared(
    trainer: Any, documents: Sequence[int], lengths: Any, vocabulary: int
) -> Callable[[], dict[str, float]]:
    """The next update, to be called when all ranks have theirs; answers its metrics."""
    from trainer_throughput import make_groups

    update = trainer.next_update
    groups = make_groups(documents, lengths, vocabulary, trainer.policy_version)
    for group in groups:
        for sample in group.samples:
            sample.logprobs = [-math.log(vocabulary)] * len(sample.response_token_ids)
    trainer.ranks.agree(None)
    return lambda: trainer.optimize(update, f"{update:064x}", groups).metrics


def run_spec(
    order: Order, documents: Sequence[int], lengths: Any, root: Path, vocabulary: int
) -> Any:
    """The run of ``trainer_throughput.py`` on so many ranks, with importance weights."""
    from trainer_throughput import Case
    from trainer_throughput import run_spec as single

    pack = documents[0] * DOCUMENTS
    case = Case(
        tokens=sum(documents),
        micro_batch_tokens=pack,
        chunk_tokens=min(8192, pack),
        checkpointing=False,
        compile=order.compiled,
        attention="sdpa" if order.cpu else "flash",
    )
    told = argparse.Namespace(device="cpu" if order.cpu else "cuda", scoring=False)
    spec = single(case, len(documents), lengths, root, told)
    own: dict[str, Any] = {"num_processes": order.world}
    rate = TINY_LEARNING_RATE if order.cpu else LEARNING_RATE
    if order.cpu:
        own |= {"compute_dtype": "float32", "num_threads": 1}
    return spec.model_copy(
        update={
            "trainer": spec.trainer.model_copy(update=own),
            "training": spec.training.model_copy(update={"use_tis": True}),
            "optimizer": spec.optimizer.model_copy(update={"learning_rate": rate}),
        }
    )


def about(told: argparse.Namespace) -> dict[str, Any]:
    """What was measured on what."""
    from live_engine import describe_machine

    shape = "tiny Qwen3, float32" if told.cpu else "shape of Qwen3-0.6B, bfloat16"
    return {"machine": describe_machine(), "shape": shape, "cpu": told.cpu}


def _make_model(folder: Path, *, cpu: bool) -> Path:
    """In a process of its own: this one must not open a GPU that a rank needs."""
    code = (
        "import sys, pathlib, trainer_throughput as t\n"
        "cpu = sys.argv[2] == 'cpu'\n"
        "t.make_model(t.TINY if cpu else t.QWEN3_06B, pathlib.Path(sys.argv[1]), sys.argv[2])\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(folder), "cpu" if cpu else "cuda"],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": _path_with(str(Path(__file__).parents[1]))},
        check=True,
        timeout=MEET_S,
    )
    return folder


def _path_with(folder: str) -> str:
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, required=True, help="of this host; ranks with --cpu")
    parser.add_argument("--cpu", action="store_true", help="a tiny model, one thread a rank")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--profile", type=Path, help="folder for time lines of one more update")
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
