"""Token rates and hardware use of every update: ``capacity-analysis.json``.

What is not known is absent from a row, never 0. A mean over engines or GPUs is there only when
all that the plan names were observed for 95 % of the update.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from activities.analysis.delivered import Delivered, read_delivered
from activities.analysis.held import FULL_COVERAGE, Summary
from activities.analysis.observations import Device, Engine, devices, engines, pipeline_series
from activities.analysis.roles import ROLES, Allocation, Fleet, Role
from activities.analysis.run_facts import read_run
from activities.analysis.stages import UpdateStages, read_timings
from activities.analysis.trained import TrainedUpdate, read_trained
from activities.storage.store import Store
from models.errors import ConfigurationError

SCOPE = (
    "one row an update; cycle: collection wait, training and publication; absent means unknown; "
    "is_warm: not within the warmup"
)
_MIB_PER_GIB = 1024
_GPU_VALUES = {
    "kernel_activity_percent": ("utilization.gpu", 1),
    "memory_used_gib": ("memory.used", _MIB_PER_GIB),
    "memory_total_gib": ("memory.total", _MIB_PER_GIB),
}
"""Name in a row -> metric of the driver and what divides it."""

Values = dict[str, float]


def measurements(root: str, warmup: int = 6, *, allow_incomplete: bool = False) -> dict[str, Any]:
    """Measure every update of the run under ``root``, as plain JSON.

    Args:
        root: the run's ``output.root``.
        warmup: first updates that are marked as not warm.
        allow_incomplete: also take a run that is not complete or did work again.

    Raises:
        ConfigurationError: no run is there, it is incomplete, or trainer and engines take turns
            on the same GPUs.
        ContractViolation: its files contradict one another or an update is not whole.
    """
    facts = read_run(root, warmup=warmup, allow_incomplete=allow_incomplete)
    if facts.plan["allocation"].get("placement") == "colocated":
        raise ConfigurationError(
            f"{facts.store.root}: trainer and engines take turns on the same GPUs "
            '(placement.mode = "colocated"); capacity is measured where each has its own'
        )
    allocation = Allocation.of(facts.plan)
    delivered, trained = read_delivered(facts), read_trained(facts)
    observed = _Observed(facts.store, allocation)
    rows: list[dict[str, Any]] = []
    for stages in read_timings(facts, 0).updates:
        got, did = delivered[stages.update], trained[stages.update]
        rows.append(
            {
                "update": stages.update + 1,
                "is_warm": stages.update >= warmup,
                **_pipeline(stages, got, allocation),
                **_trainer(stages, got, did, allocation),
                **_quality(got, did),
                **observed.row(stages),
            }
        )
    return {
        "schema_version": 1,
        "root": facts.store.root,
        "scope": SCOPE,
        "stopped_for_time": facts.stopped_for_time,
        "allocation": facts.plan["allocation"],
        "warmup_updates": warmup,
        "rows": rows,
    }


def _pipeline(stages: UpdateStages, got: Delivered, allocation: Allocation) -> Values:
    row = {
        "pipeline/cycle_seconds": stages.cycle,
        "pipeline/collection_seconds": stages.generation_wait,
        "pipeline/publication_seconds": stages.publication,
    }
    busy = stages.training + stages.publication
    tokens = got.response_tokens
    row |= _rate("pipeline/trainer_occupied_fraction", busy, stages.cycle)
    row |= _rate("pipeline/useful_response_tokens_per_second", tokens, stages.cycle)
    row |= _rate(
        "pipeline/useful_response_tokens_per_allocated_gpu_second",
        tokens,
        stages.cycle * allocation.allocated_gpus,
    )
    row |= _rate(
        "inference/useful_response_tokens_per_gpu_cycle_second",
        tokens,
        stages.cycle * allocation.inference_gpus,
    )
    return row


def _trainer(
    stages: UpdateStages, got: Delivered, did: TrainedUpdate, allocation: Allocation
) -> Values:
    gpus = allocation.trainer_gpus
    row = {"trainer/score_train_seconds": stages.training}
    row |= _rate(
        "trainer/useful_response_tokens_per_gpu_cycle_second",
        got.response_tokens,
        stages.cycle * gpus,
    )
    if did.steps:
        row["trainer/step_seconds"] = did.step_seconds
        for name, key in (("model", "model_tokens"), ("active_response", "active_tokens")):
            tokens = did.normalized(key)
            row |= _rate(f"trainer/{name}_tokens_per_second", tokens, did.step_seconds)
            row |= _rate(f"trainer/{name}_tokens_per_gpu_second", tokens, did.step_seconds * gpus)
    if did.scoring_seconds is not None:
        tokens = sum(int(event["model_tokens"]) for event in did.scoring.values())
        row["trainer/scoring_seconds"] = did.scoring_seconds
        row |= _rate("trainer/scoring_model_tokens_per_second", tokens, did.scoring_seconds)
        row |= _rate(
            "trainer/scoring_model_tokens_per_gpu_second", tokens, did.scoring_seconds * gpus
        )
    return row


def _quality(got: Delivered, did: TrainedUpdate) -> Values:
    row = {f"quality/{name}": value for name, value in (got.counters or {}).items()}
    if got.mixed_responses is not None:
        row["quality/mixed_responses"] = got.mixed_responses
    current, active = did.current_tokens()
    return row | _rate("quality/current_policy_token_fraction", current, active)


def _rate(name: str, amount: float, per: float) -> Values:
    return {name: amount / per} if per > 0 else {}


class _Observed:
    """What was observed, update by update."""

    def __init__(self, store: Store, allocation: Allocation) -> None:
        fleet = Fleet(store, allocation)
        self._allocation = allocation
        self._pipeline = pipeline_series(store)
        self._engines = engines(store)
        self._ranks = fleet.engine_ranks()
        self._devices = [(device, fleet.role(device)) for device in devices(store)]

    def row(self, stages: UpdateStages) -> Values:
        window = stages.start_unix, stages.end_unix
        if not window[0] < window[1]:
            return {}
        row: Values = {}
        for name, series in self._pipeline.items():
            row |= _values(f"pipeline/{name}", series.summary(*window))
        return row | self._inference(window) | self._hardware(window)

    def _inference(self, window: tuple[float, float]) -> Values:
        row: Values = {}
        seen: dict[str, dict[int, Summary]] = {}
        for rank, engine in self._present(window):
            for name in sorted({name for name, _ in engine.series}):
                series = engine.named(name)
                if series is None:
                    continue
                summary = series.summary(*window)
                row |= _values(f"inference/engine_{rank}/{name}", summary, peak=True)
                seen.setdefault(name, {})[rank] = summary
        expected = range(self._allocation.engines)
        for name, ranks in seen.items():
            means = _full(ranks.get(rank) for rank in expected)
            if means is None:
                continue
            row[f"inference/{name}"] = sum(means) / len(means)
            if name == "gen_throughput":
                row |= _rate(
                    "inference/observed_decode_tokens_per_gpu_second",
                    sum(means),
                    self._allocation.inference_gpus,
                )
        return row

    def _present(self, window: tuple[float, float]) -> Iterator[tuple[int, Engine]]:
        """Engines observed in ``window`` with their ranks.

        The fleet names the newest life of each; earlier ones take the ranks that are free then.
        """
        present = [engine for engine in self._engines if _is_observed(engine, window)]
        urls = [engine.url for engine in present]
        known = {url: self._ranks[url] for url in urls if url in self._ranks}
        taken = set(known.values())
        free = iter(rank for rank in range(len(present) + len(taken)) if rank not in taken)
        for engine in sorted(present, key=lambda engine: engine.first_seen):
            yield known[engine.url] if engine.url in known else next(free), engine

    def _hardware(self, window: tuple[float, float]) -> Values:
        row: Values = {}
        seen: dict[tuple[Role, str], list[Summary]] = {}
        for device, role in self._devices:
            for name, (metric, divisor) in _GPU_VALUES.items():
                summary = device.metrics[metric].summary(*window)
                place = f"{role or 'unknown'}/{_gpu_name(device)}/{name}"
                row |= _values(place, summary, divisor=divisor)
                if role is not None:
                    seen.setdefault((role, name), []).append(summary)
        for role in ROLES:
            expected = self._allocation.gpus(role)
            for name, (_, divisor) in _GPU_VALUES.items():
                means = _full(seen.get((role, name), ()))
                if means and len(means) >= expected:
                    row[f"{role}/{name}"] = sum(means) / len(means) / divisor
        return row


def _is_observed(engine: Engine, window: tuple[float, float]) -> bool:
    return any(series.summary(*window).coverage for series in engine.series.values())


def _gpu_name(device: Device) -> str:
    return f"{device.node}_gpu_{device.index}"


def _values(name: str, summary: Summary, *, peak: bool = False, divisor: float = 1) -> Values:
    row = {f"{name}_coverage": summary.coverage}
    if summary.mean is not None:
        row[name] = summary.mean / divisor
    if peak and summary.maximum is not None:
        row[f"{name}_peak"] = summary.maximum / divisor
    return row


def _full(summaries: Iterable[Summary | None]) -> Sequence[float] | None:
    """Their means; None when one is missing or not known for nearly the whole window."""
    means: list[float] = []
    for summary in summaries:
        if summary is None or summary.mean is None or summary.coverage < FULL_COVERAGE:
            return None
        means.append(summary.mean)
    return means
