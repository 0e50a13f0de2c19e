"""Everything that a run on GPUs relies on, asked before it: machine, model, agreement."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.placement import PlacementSection
from configs.run import RunSpec
from models.errors import ConfigurationError
from workers.preflight.ceilings import LEAST_SHARE, data_sheet
from workers.preflight.finding import Finding
from workers.preflight.machine import gpu_findings, gpus, software_findings
from workers.preflight.model_folder import examine_folder
from workers.preflight.probe import ProbeFailed, run_probe

CEILINGS_TIMEOUT_S = 120.0
ALL_REDUCE_TIMEOUT_S = 240.0
SCORING_TIMEOUT_S = 300.0
"""For the trainer's part of the agreement: loading, compiling, eight forwards."""
MAX_MEAN_GAP = 0.1
"""Nats; a run may set its own limit with core.max_train_rollout_logprob_abs_diff."""
_TERA = 1e12

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to run: a checked run file and its model folder."""

    spec: RunSpec
    folder: Path


def examine_gpus(subject: Subject | None, say: Say) -> list[Finding]:
    """Every check, in order; what needs a GPU is left out where there is none.

    ``say`` is told what is going on: some checks take a minute.
    """
    findings = []
    try:
        seen = gpus()
        findings += gpu_findings(seen)
        missing = "" if seen else "the driver shows none"
    except ConfigurationError as error:
        seen, missing = [], error.message
    if missing:
        findings.append(Finding("GPU", "at least one", missing, False))
    with_sglang = subject is None or subject.spec.inference.engine == "sglang"
    findings += software_findings(with_sglang=with_sglang)
    if seen:
        say(f"measuring {len(seen)} GPUs")
        findings += _machine(len(seen))
    if subject is not None:
        findings += examine_folder(subject.folder)
        findings.append(_agreement(subject, say, on_gpu=bool(seen)))
    return findings


def _machine(num_gpus: int) -> Iterator[Finding]:
    for place in range(num_gpus):
        yield from _ceilings(place)
    expected = f"the right sum on {num_gpus} GPUs"
    try:
        told = run_probe("all_reduce", num_gpus, ALL_REDUCE_TIMEOUT_S)
    except ProbeFailed as error:
        yield Finding("NCCL all-reduce", expected, str(error), False)
        return
    rate = f", {told['bus_rate'] / 1e9:.0f} GB/s of bus" if num_gpus > 1 else ""
    seen = f"{'right' if told['right'] else 'WRONG'}{rate}"
    yield Finding("NCCL all-reduce", expected, seen, told["right"])


def _ceilings(place: int) -> Iterator[Finding]:
    try:
        told = run_probe("ceilings", place, CEILINGS_TIMEOUT_S)
    except ProbeFailed as error:
        yield Finding(f"GPU {place} rates", "measured", str(error), False)
        return
    sheet = data_sheet(told["name"])
    rates = (
        ("copy", told["copy"], sheet and sheet.memory, "TB/s"),
        ("bfloat16 product", told["product"], sheet and sheet.bfloat16, "TFLOP/s"),
    )
    for what, rate, peak, unit in rates:
        expected = (
            "no data sheet" if peak is None else f">= {LEAST_SHARE * peak / _TERA:.4g} {unit}"
        )
        ok = None if peak is None else rate >= LEAST_SHARE * peak
        yield Finding(f"GPU {place} {what}", expected, f"{rate / _TERA:.3g} {unit}", ok)


def _agreement(subject: Subject, say: Say, *, on_gpu: bool) -> Finding:
    limit = subject.spec.core.max_train_rollout_logprob_abs_diff or MAX_MEAN_GAP
    expected = f"mean gap of log-probs <= {limit:g}"
    name = "engine and trainer agree"
    if subject.spec.placement.mode != "cpu" and not on_gpu:
        return Finding(name, expected, "not asked: the run needs a GPU", None)
    say("starting an engine and the trainer, some minutes at most")
    spec = on_one_gpu(subject.spec)
    argument = {"spec": spec.model_dump(mode="json"), "folder": str(subject.folder)}
    timeout_s = spec.inference.start_timeout_s + SCORING_TIMEOUT_S
    try:
        told = run_probe("agreement", argument, timeout_s)
    except ProbeFailed as error:
        return Finding(name, expected, str(error), False)
    seen = (
        f"mean {told['mean']:.4f}, p99 {told['p99']:.3f}, max {told['max']:.3f} over "
        f"{told['tokens']} tokens on {told['device']}"
    )
    return Finding(name, expected, seen, told["mean"] <= limit)


def on_one_gpu(spec: RunSpec) -> RunSpec:
    """``spec`` with an engine that leaves room for a trainer on its first GPU."""
    if spec.placement.mode == "cpu":
        return spec
    kept = {k: v for k, v in spec.inference.sglang.items() if k != "mem_fraction_static"}
    inference = spec.inference.model_copy(update={"sglang": kept})
    placement = PlacementSection(mode="colocated")
    return spec.model_copy(update={"inference": inference, "placement": placement})
