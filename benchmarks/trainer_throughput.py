r"""How fast the trainer takes an update on one GPU, and how much of the GPU's arithmetic that is.

    python benchmarks/trainer_throughput.py                       the standard cases, in 100 s
    python benchmarks/trainer_throughput.py --tokens 65536 --compile no yes \
        --checkpointing no yes --chunk-tokens 4096 8192 \
        --micro-batch-tokens 16384 65536 --budget-s 600           every combination
    python benchmarks/trainer_throughput.py --profile             time by kernel, of every case
    python benchmarks/trainer_throughput.py --device cpu --tiny   does it run at all

The standard cases are compiled or not, with checkpointing or without, of 65,536 tokens, and one of
16,384; the first of either way of computing is profiled. ``--budget-s`` counts from the start of
the program: cases for which no time is left are named as such, and measured less often before.

A dense model of the shape of Qwen3-0.6B with random weights, documents of 512 to 4096 tokens (a
prompt of 128, four responses each). What is timed is ``LocalTrainer.optimize``: everything between
a collection in memory and the next policy version, checks and contract file included. After two
updates to warm up the median of the others counts.

FLOP of an update = 6 x (weights of the layers' products) x tokens
                  + 6 x hidden x vocabulary x scored tokens
                  + 12 x layers x heads x head size x pairs of tokens that causality leaves,

a multiplication and an addition counted as two, backward as twice forward; what is computed again
counts once. MFU is that over seconds and the peak rate of dense bfloat16 products.
"""

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from kernel_profile import profiled
from transformers import AutoModelForCausalLM, Qwen3Config

from configs.run import RunSpec
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.trainers import flash4
from workers.trainers.local import LocalTrainer

PEAK_RATE = 989e12
"""FLOP/s of an H100 or H200 in dense bfloat16, by its data sheet."""
SIBLINGS = 4
WARM_UP = 2
PROFILE_S = 8.0
"""What a profile may take."""
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **QWEN3_06B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One combination of settings."""

    tokens: int
    micro_batch_tokens: int
    chunk_tokens: int
    checkpointing: bool
    compile: bool
    attention: str


class Budget:
    """Seconds that the program may take, from its start on."""

    def __init__(self, seconds: float) -> None:
        self._end = psutil.Process().create_time() + seconds

    @property
    def left(self) -> float:
        """Seconds from now on; negative afterwards."""
        return self._end - time.time()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Shortest and longest document, and the prompt that each begins with."""

    shortest: int
    longest: int
    prompt: int


def main() -> None:
    """Measure every case; a line each, then one JSON line with all."""
    told = _arguments()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a run's trainer
    shape, lengths = (QWEN3_06B, Lengths(512, 4096, 128))
    if told.tiny:
        shape, lengths = (TINY, Lengths(32, 128, 8))
    if told.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU is visible; use --device cpu --tiny")
    if told.device == "cpu" and torch.cuda.is_available():
        raise SystemExit("a GPU is visible and would be used; set CUDA_VISIBLE_DEVICES=''")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = make_model(shape, Path(scratch) / "model", told.device)
        quickest, seen = 0.0, set[bool]()
        for place, case in enumerate(cases(told)):
            if rows and told.budget.left < quickest:
                rows.append({**asdict(case), "error": "not measured: no time left"})
                continue
            began = time.perf_counter()
            profile = told.profile or (told.standard and case.compile not in seen)
            root = Path(scratch) / f"case-{place}"
            try:
                row = measure(case, shape, lengths, model_dir, root, told, profile=profile)
                seen.add(case.compile)
            except torch.OutOfMemoryError as error:
                row = {"error": f"out of memory: {str(error).splitlines()[0][:150]}"}
            took = time.perf_counter() - began
            quickest = min(quickest, took) or took
            rows.append({**asdict(case), **row})
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            if told.device == "cuda":
                torch.cuda.empty_cache()
    print("\n".join(table(rows)))
    gpu = torch.cuda.get_device_name() if told.device == "cuda" else "none"
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "gpu": gpu}
    print(json.dumps({**about, "shape": shape, "rows": rows}))


def measure(
    case: Case,
    shape: dict[str, Any],
    lengths: Lengths,
    model_dir: Path,
    root: Path,
    told: argparse.Namespace,
    *,
    profile: bool,
) -> dict[str, Any]:
    """Figures of one case; with a table of kernels if there is time for it."""
    documents = document_lengths(case.tokens, lengths)
    spec = run_spec(case, len(documents), lengths, root, told)
    trainer = LocalTrainer(spec, model_dir)
    seconds: list[float] = []
    last: dict[str, float] = {}
    for update in range(WARM_UP + told.repeats):
        if update > WARM_UP and told.budget.left < seconds[-1]:
            break
        groups = make_groups(documents, lengths, shape["vocab_size"], trainer.policy_version)
        started = time.perf_counter()
        last = trainer.optimize(update, f"{update:064x}", groups).metrics
        seconds.append(time.perf_counter() - started)
    took = statistics.median(seconds[WARM_UP:])
    operations = update_operations(shape, documents, lengths.prompt)
    row: dict[str, Any] = {
        "documents": len(documents),
        "updates": len(seconds) - WARM_UP,
        "seconds": took,
        "seconds_low": min(seconds[WARM_UP:]),
        "seconds_high": max(seconds[WARM_UP:]),
        "first_update_seconds": seconds[0],
        "tokens_per_second": case.tokens / took,
        "tera_operations": operations / 1e12,
        "mfu": operations / took / PEAK_RATE,
        "peak_gib": last.get("train/packing/rank0_peak_allocated_bytes", 0.0) / 2**30,
        "reserved_gib": last.get("train/memory/peak_reserved_bytes", 0.0) / 2**30,
        "estimated_gib": trainer.describe()["estimated_bytes"] / 2**30,
        "loss": last["train/loss"],
        "grad_norm": last["train/grad_norm"],
    }
    if profile and told.budget.left > PROFILE_S:
        update = trainer.next_update
        groups = make_groups(documents, lengths, shape["vocab_size"], trainer.policy_version)
        seen = profiled(
            lambda: trainer.optimize(update, f"{update:064x}", groups), shape, told.device
        )
        print(seen.table(), flush=True)
        row["profile_ms"] = seen.as_json()
    return row


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line a case, as in the table of results."""
    yield (
        "| tokens | micro-batch | attention | compiled | checkpointing | s | tokens/s | MFU "
        "| peak GiB (expected) |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        how = " | ".join("yes" if row[key] else "no" for key in ("compile", "checkpointing"))
        case = f"| {row['tokens']:,} | {row['micro_batch_tokens']:,} | {row['attention']} | {how} "
        if "error" in row:
            yield f"{case}| {row['error']} | | | |"
        else:
            yield (
                f"{case}| {row['seconds']:.3f} | {row['tokens_per_second']:,.0f} "
                f"| {row['mfu']:.3f} | {row['peak_gib']:.1f} ({row['estimated_gib']:.1f}) |"
            )


def cases(told: argparse.Namespace) -> Iterator[Case]:
    """The standard ones, most telling first, or every combination of what was asked for.

    A micro-batch of 0 tokens holds the whole update.
    """
    if told.standard:
        most = 1024 if told.tiny else 65536
        for tokens, micro, again, compiled in (
            (most, most, False, True),
            (most, most // 4, False, False),
            (most, most, True, True),
            (most, most, True, False),
            (most, most // 4, False, True),
            (most // 4, most // 4, False, True),
            (most // 4, most // 4, False, False),
        ):
            if not (compiled and told.device == "cpu"):
                yield Case(tokens, micro, told.chunk_tokens[0], again, compiled, told.attention[0])
        return
    yes = {"yes": True, "no": False}
    for tokens, micro, chunk, again, compiled, attention in itertools.product(
        told.tokens,
        told.micro_batch_tokens,
        told.chunk_tokens,
        told.checkpointing,
        told.compile,
        told.attention,
    ):
        yield Case(tokens, micro or tokens, chunk, yes[again], yes[compiled], attention)


def make_model(shape: dict[str, Any], folder: Path, device: str) -> Path:
    """A Hugging Face folder of random weights in bfloat16."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def document_lengths(tokens: int, lengths: Lengths) -> list[int]:
    """Whole groups of documents whose lengths, spread evenly, are ``tokens`` together."""
    mean = (lengths.shortest + lengths.longest) / 2
    count = max(1, round(tokens / mean / SIBLINGS)) * SIBLINGS
    rng = random.Random(tokens)
    drawn = [rng.uniform(lengths.shortest, lengths.longest) for _ in range(count)]
    found = [
        min(max(round(x * tokens / sum(drawn)), lengths.shortest), lengths.longest) for x in drawn
    ]
    while rest := tokens - sum(found):
        place = rng.randrange(count)
        room = lengths.longest - found[place] if rest > 0 else lengths.shortest - found[place]
        found[place] += min(rest, room) if rest > 0 else max(rest, room)
    return found


def make_groups(
    documents: Sequence[int], lengths: Lengths, vocabulary: int, version: int
) -> list[SampleGroup]:
    """Random ids; log-probs as those of a model that knows nothing."""
    rng = random.Random(7)
    groups = []
    for first in range(0, len(documents), SIBLINGS):
        prompt = [rng.randrange(vocabulary) for _ in range(lengths.prompt)]
        index, samples = first // SIBLINGS, []
        for place in range(SIBLINGS):
            count = documents[first + place] - lengths.prompt
            samples.append(
                Sample(
                    sample_index=first + place,
                    group_index=index,
                    prompt_token_ids=prompt,
                    response_token_ids=[rng.randrange(vocabulary) for _ in range(count)],
                    logprobs=[-12.0] * count,
                    spans=[TokenSpan(version, 0, count)],
                    finish_reason=FinishReason.STOP,
                )
            )
        advantages = [0.5, -0.5] * (SIBLINGS // 2)
        groups.append(SampleGroup(index, f"prompt-{index}", 0, samples, advantages))
    return groups


def run_spec(
    case: Case, documents: int, lengths: Lengths, root: Path, told: argparse.Namespace
) -> RunSpec:
    """A run that trains one such collection an update."""
    return RunSpec.model_validate(
        {
            "schema_version": 1,
            "name": "trainer-throughput",
            "model": {"source": "tiny"},
            "data": {"prompt_data": "none.jsonl"},
            "output": {"root": str(root)},
            "training": {
                "num_rollouts": 100,
                "rollout_batch_size": documents // SIBLINGS,
                "samples_per_prompt": SIBLINGS,
            },
            "optimizer": {"learning_rate": 1e-6},
            "core": {
                "max_context_length": lengths.longest,
                "scoring_pass_required": told.scoring,
                "scoring_check_interval": 0,
            },
            "inference": {"max_response_length": lengths.longest - lengths.prompt},
            "trainer": {
                "compute_dtype": "bfloat16",
                "attention": case.attention,
                "packing": "documents",
                "micro_batch_tokens": case.micro_batch_tokens,
                "logprob_chunk_tokens": case.chunk_tokens,
                "activation_checkpointing": case.checkpointing,
                "compile": case.compile,
            },
        }
    )


def update_operations(shape: dict[str, Any], documents: Sequence[int], prompt: int) -> int:
    """FLOP of one update; see above."""
    width, size = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size
    layer = width * (2 * queries + 2 * keys + 3 * shape["intermediate_size"])
    tokens, scored = sum(documents), sum(length - prompt for length in documents)
    pairs = sum(length * (length + 1) // 2 for length in documents)
    layers: int = shape["num_hidden_layers"]
    products = 6 * layers * layer * tokens + 6 * width * shape["vocab_size"] * scored
    return int(products + 12 * layers * queries * pairs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags = {"nargs": "+", "choices": ["no", "yes"]}
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, short documents")
    parser.add_argument("--tokens", type=int, nargs="+", help="of an update")
    parser.add_argument("--micro-batch-tokens", type=int, nargs="+", default=[0], help="0: all")
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--checkpointing", default=["no"], **flags)
    parser.add_argument("--compile", default=["yes"], **flags)
    parser.add_argument(
        "--attention", nargs="+", choices=["sdpa", "flash", "flash4"], help="default: the newest"
    )
    parser.add_argument("--scoring", action="store_true", help="a scoring pass in every update")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="kernels of every case")
    parser.add_argument("--budget-s", type=float, default=100.0, help="for the whole program")
    told = parser.parse_args()
    told.budget = Budget(told.budget_s)
    asked = ("tokens", "micro_batch_tokens", "checkpointing", "compile")
    told.standard = all(getattr(told, key) == parser.get_default(key) for key in asked)
    told.tokens = told.tokens or ([1024] if told.tiny else [16384, 65536])
    if told.device == "cpu":
        told.compile = ["no"]
    newest = "flash" if flash4.missing(torch.device(told.device)) else "flash4"
    told.attention = told.attention or ["sdpa" if told.device == "cpu" else newest]
    return told


if __name__ == "__main__":
    main()
