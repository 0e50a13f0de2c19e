r"""How fast the trainer takes an update on one GPU, and how much of the GPU's arithmetic that is.

    python benchmarks/trainer_throughput.py                       16k and 65k tokens, as configured
    python benchmarks/trainer_throughput.py --tokens 65536 --compile no yes \
        --checkpointing no yes --chunk-tokens 4096 8192 \
        --micro-batch-tokens 16384 65536                          every combination
    python benchmarks/trainer_throughput.py --profile             time by what it is spent on
    python benchmarks/trainer_throughput.py --device cpu --tiny   does it run at all

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
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

from configs.run import RunSpec
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.trainers.local import LocalTrainer

PEAK_RATE = 989e12
"""FLOP/s of an H100 or H200 in dense bfloat16, by its data sheet."""
SIBLINGS = 4
WARM_UP = 2
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


@dataclass(frozen=True, slots=True)
class Lengths:
    """Shortest and longest document, and the prompt that each begins with."""

    shortest: int
    longest: int
    prompt: int


def main() -> None:
    """Measure every case; a line each, then one JSON line with all."""
    told = _arguments()
    shape, lengths = (QWEN3_06B, Lengths(512, 4096, 128))
    if told.tiny:
        shape, lengths = (TINY, Lengths(32, 128, 8))
    if told.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU is visible; use --device cpu --tiny")
    if told.device == "cpu" and torch.cuda.is_available():
        raise SystemExit("a GPU is visible and would be used; set CUDA_VISIBLE_DEVICES=''")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = make_model(shape, Path(scratch) / "model")
        for place, case in enumerate(cases(told)):
            root = Path(scratch) / f"case-{place}"
            try:
                row = measure(case, shape, lengths, model_dir, root, told)
            except torch.OutOfMemoryError as error:
                row = {"error": f"out of memory: {str(error).splitlines()[0][:150]}"}
            rows.append({**asdict(case), **row})
            print(json.dumps(rows[-1]), flush=True)
            torch._dynamo.reset()
            gc.collect()
            if told.device == "cuda":
                torch.cuda.empty_cache()
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
) -> dict[str, Any]:
    """Figures of one case."""
    documents = document_lengths(case.tokens, lengths)
    spec = run_spec(case, len(documents), lengths, root, told)
    trainer = LocalTrainer(spec, model_dir)
    seconds = []
    last: dict[str, float] = {}
    for update in range(WARM_UP + told.repeats):
        groups = make_groups(documents, lengths, shape["vocab_size"], trainer.policy_version)
        started = time.perf_counter()
        last = trainer.optimize(update, f"{update:064x}", groups).metrics
        seconds.append(time.perf_counter() - started)
    took = statistics.median(seconds[WARM_UP:])
    operations = update_operations(shape, documents, lengths.prompt)
    row: dict[str, Any] = {
        "documents": len(documents),
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
    if told.profile:
        groups = make_groups(documents, lengths, shape["vocab_size"], trainer.policy_version)
        row["profile_ms"] = profiled(trainer, groups, shape, told.device)
    return row


def cases(told: argparse.Namespace) -> Iterator[Case]:
    """Every combination of what was asked for; a micro-batch of 0 tokens holds the whole update."""
    yes = {"yes": True, "no": False}
    for tokens, micro, chunk, again, compiled in itertools.product(
        told.tokens, told.micro_batch_tokens, told.chunk_tokens, told.checkpointing, told.compile
    ):
        yield Case(tokens, micro or tokens, chunk, yes[again], yes[compiled])


def make_model(shape: dict[str, Any], folder: Path) -> Path:
    """A Hugging Face folder of random weights in bfloat16."""
    torch.manual_seed(0)
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
    on_gpu = told.device == "cuda"
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
                "attention": "flash" if on_gpu else "sdpa",
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


def profiled(
    trainer: LocalTrainer, groups: list[SampleGroup], shape: dict[str, Any], device: str
) -> dict[str, float]:
    """Milliseconds of one more update by kind, of kernels on a GPU, of operators on a CPU.

    Products are told apart by their sizes, where the profiler says which operator ran them.
    """
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device == "cuda" else []
    update = trainer.next_update
    started = time.perf_counter()
    with profile(activities=activities, record_shapes=True) as seen:
        trainer.optimize(update, f"{update:064x}", groups)
    wall = (time.perf_counter() - started) * 1e3
    kinds: dict[str, float] = {}
    products: dict[str, float] = {}
    for event in seen.key_averages(group_by_input_shape=True):
        on_device = "CPU" not in str(event.device_type)
        spent = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if event.key in ("aten::mm", "aten::addmm"):
            kind = product_kind(event.input_shapes, shape)
            products[kind] = products.get(kind, 0.0) + spent / 1e3
        if on_device == (device == "cuda"):
            kind = kernel_kind(event.key)
            kinds[kind] = kinds.get(kind, 0.0) + spent / 1e3
    kinds |= {f"products: {kind}": spent for kind, spent in products.items()}
    busy = sum(spent for kind, spent in kinds.items() if ":" not in kind)
    return {**dict(sorted(kinds.items())), "busy": busy, "wall, profiler on": wall}


def kernel_kind(name: str) -> str:
    """What a kernel or operator is for, by its name."""
    name = name.lower()
    kinds = {
        "attention": ("flash", "fmha", "scaled_dot", "varlen"),
        "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "aten::mm", "aten::addmm"),
        "log-softmax": ("softmax", "logsumexp", "gather", "online"),
        "optimizer": ("adam", "multi_tensor", "foreach"),
        "copies": ("memcpy", "memset"),
    }
    return next(
        (kind for kind, marks in kinds.items() if any(mark in name for mark in marks)),
        "elementwise",
    )


def product_kind(shapes: Sequence[Sequence[int]], shape: dict[str, Any]) -> str:
    """Which part of the model a product belongs to, by the sizes of its factors."""
    sizes = {size for factor in shapes if isinstance(factor, list) for size in factor}
    if shape["vocab_size"] in sizes:
        return "head"
    return "mlp" if shape["intermediate_size"] in sizes else "attention projections"


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
    parser.add_argument("--scoring", action="store_true", help="a scoring pass in every update")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    told = parser.parse_args()
    told.tokens = told.tokens or ([1024] if told.tiny else [16384, 65536])
    if told.device == "cpu":
        told.compile = ["no"]
    return told


if __name__ == "__main__":
    main()
