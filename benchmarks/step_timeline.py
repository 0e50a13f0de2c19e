"""Where the wall time of one update goes: computing, NCCL that nothing hides, a GPU that waits.

Read from a profiler's trace: what ran on the GPU and when, what the processor did meanwhile. A
kernel of NCCL also spins while it waits for the other rank, which counts as NCCL. On a CPU, where
no GPU is seen, the processor's part is left.
"""

import functools
import gzip
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile, record_function

from workers.trainers.local import LocalTrainer
from workers.trainers.logprobs import Scorer
from workers.trainers.optimizer_step import OptimizerStep
from workers.trainers.process_ranks import ProcessRanks
from workers.trainers.update_scores import UpdateScores

Span = tuple[float, float]
"""Begin and end in microseconds."""

STAGES = {
    "forward of layers": (Scorer, "_hidden"),
    "forward and backward": (LocalTrainer, "_backward"),
    "compare scores": (UpdateScores, "compare"),
    "admit, clip": (OptimizerStep, "admit"),
    "AdamW, its norm": (OptimizerStep, "apply"),
    "small values of ranks": (ProcessRanks, "_gather"),
}
"""What a line of the table is about, by the call that it is; the first lies within the second."""
_PREFIX, _UPDATE = "stage: ", "whole update"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_PROMPT_US = 30.0
"""A kernel that begins so soon after its launch found an idle GPU: the processor was the limit."""
TOP = 12


@dataclass(frozen=True, slots=True)
class Timeline:
    """Of one update on one rank, in milliseconds."""

    wall: float
    """With the profiler on."""
    compute: float
    """Some kernel that is not NCCL's runs."""
    nccl: float
    """Some kernel of NCCL runs."""
    exposed: float
    """Of it, without any other."""
    idle: float
    """Nothing runs."""
    prompt: float
    """Share of kernels that began as soon as they were launched."""
    stages: dict[str, tuple[int, float, float, float]]
    """Calls, processor's time, exposed NCCL and idle GPU within it."""
    gaps: list[tuple[float, float, str]]
    """Longest times of an idle GPU: when, how long, what the processor did in the middle."""
    operators: list[tuple[str, int, float]]
    """Most processor time of their own: name, calls, milliseconds."""

    def table(self) -> str:
        """For people."""
        shares = {
            "computing": self.compute,
            "NCCL": self.nccl,
            "  of it exposed": self.exposed,
            "GPU idle": self.idle,
        }
        lines = [f"{'wall, profiler on':34} {self.wall:9.2f} ms"]
        lines += [
            f"{name:34} {spent:9.2f} ms {spent / self.wall:6.1%}" for name, spent in shares.items()
        ]
        lines.append(f"{'kernels that found an idle GPU':34} {self.prompt:9.1%}")
        lines.append(f"{'stage':34} {'calls':>6} {'ms':>9} {'exposed':>9} {'GPU idle':>9}")
        for name, (calls, spent, exposed, idle) in self.stages.items():
            lines.append(f"{name:34} {calls:6} {spent:9.2f} {exposed:9.2f} {idle:9.2f}")
        lines.append(f"{'GPU idle at, ms':>18} {'for':>9}  while the processor was in")
        lines += [f"{at:18.2f} {size:9.3f}  {name[:70]}" for at, size, name in self.gaps]
        lines.append(f"{'processor, of its own':58} {'calls':>6} {'ms':>9}")
        lines += [f"{name[:58]:58} {calls:6} {own:9.2f}" for name, calls, own in self.operators]
        return "\n".join(lines)


def observed(update: Callable[[], object], trace: Path, *, gpu: bool) -> Timeline:
    """Run ``update`` once under the profiler; its trace goes to ``trace`` (``.json.gz``)."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with _staged(), profile(activities=activities) as seen:
        started = time.perf_counter()
        with record_function(_PREFIX + _UPDATE):
            update()
        wall = (time.perf_counter() - started) * 1e3
    trace.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(trace))
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_cpu_time_total)[:TOP]
    operators = [(row.key, row.count, row.self_cpu_time_total / 1e3) for row in rows]
    return timeline(events, wall, operators)


def timeline(
    events: Iterable[dict[str, Any]], wall: float, operators: list[tuple[str, int, float]]
) -> Timeline:
    """What ``events`` of a trace say of an update that took ``wall`` milliseconds."""
    whole = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    on_gpu = [event for event in whole if event.get("cat") in _ON_GPU]
    computing = union(_span(event) for event in on_gpu if not _is_nccl(event))
    talking = union(_span(event) for event in on_gpu if _is_nccl(event))
    busy = union([*computing, *talking])
    stages = [
        event
        for event in whole
        if event.get("cat") == "user_annotation" and event["name"].startswith(_PREFIX)
    ]
    begin = min((event["ts"] for event in stages), default=0.0)
    end = max((event["ts"] + event["dur"] for event in stages), default=0.0)
    idle = without([(begin, end)], busy) if on_gpu else []
    exposed = without(talking, computing)
    processor = [e for e in whole if e.get("cat") in ("cpu_op", "cuda_runtime", "user_annotation")]
    longest = sorted(idle, key=lambda span: span[0] - span[1])[:TOP]
    return Timeline(
        wall=wall,
        compute=total(computing),
        nccl=total(talking),
        exposed=total(exposed),
        idle=total(idle),
        prompt=_prompt(whole, on_gpu),
        stages={name: _stage(name, stages, exposed, idle) for name in (_UPDATE, *STAGES)},
        gaps=[
            ((low - begin) / 1e3, (high - low) / 1e3, _doing((low + high) / 2, processor))
            for low, high in sorted(longest)
        ],
        operators=operators,
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times, in order and apart."""
    found: list[Span] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def without(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """What of ``spans`` is not in ``taken``; both in order and apart."""
    found = []
    ends = [high for _, high in taken]
    for begin, high in spans:
        low = begin
        for first, last in taken[bisect_right(ends, low) :]:
            if first >= high:
                break
            if first > low:
                found.append((low, first))
            low = max(low, last)
        if low < high:
            found.append((low, high))
    return found


def total(spans: Iterable[Span]) -> float:
    """Milliseconds."""
    return sum((high - low for low, high in spans), 0.0) / 1e3


def _stage(
    name: str, stages: Sequence[dict[str, Any]], exposed: Sequence[Span], idle: Sequence[Span]
) -> tuple[int, float, float, float]:
    own = [_span(event) for event in stages if event["name"] == _PREFIX + name]
    spans = union(own)
    within = [total(spans) - total(without(spans, each)) for each in (exposed, idle)]
    return len(own), total(spans), within[0], within[1]


def _prompt(whole: Iterable[dict[str, Any]], on_gpu: Iterable[dict[str, Any]]) -> float:
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in whole
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    delays: list[float] = [
        event["ts"] - launched[event["args"]["correlation"]]
        for event in on_gpu
        if event.get("args", {}).get("correlation") in launched
    ]
    return sum(delay < _PROMPT_US for delay in delays) / max(len(delays), 1)


def _doing(moment: float, processor: Iterable[dict[str, Any]]) -> str:
    """The innermost call on any thread at that moment."""
    around = [e for e in processor if e["ts"] <= moment < e["ts"] + e["dur"]]
    names = [event["name"] for event in sorted(around, key=lambda event: -event["dur"])]
    return " > ".join(names[-3:]) or "nothing that the profiler sees"


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _is_nccl(event: dict[str, Any]) -> bool:
    return "nccl" in event["name"].lower()


@contextmanager
def _staged() -> Iterator[None]:
    """Let the trace name the calls of ``STAGES``."""
    with ExitStack() as stack:
        for name, (owner, method) in STAGES.items():
            plain = getattr(owner, method)
            stack.enter_context(mock.patch.object(owner, method, _named(plain, _PREFIX + name)))
        yield


def _named(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return plain(*arguments, **options)

    return call
