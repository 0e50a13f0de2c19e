"""How fast a finished run was, and what the trainer waited for: ``throughput-analysis.json``.

The cycle of an update is what it waited for its collection, trained and published; checkpoints,
evaluations and starts are beside it, in ``all_driver_stage_seconds``.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from activities.analysis.delivered import KINDS, Delivered, read_delivered, total
from activities.analysis.run_facts import RunFacts, read_run
from activities.analysis.stages import UPDATE_STAGES, Timings, UpdateStages, read_timings
from activities.analysis.trained import TrainedUpdate, read_trained
from activities.storage import layout
from models.errors import ContractViolation

QUEUE_SLACK_S = 1e-3
"""By which a wait in the queue may exceed the stage around it: they are measured by two clocks."""

Row = tuple[UpdateStages, Delivered, TrainedUpdate]


def analyze(root: str, warmup: int = 3, *, allow_incomplete: bool = False) -> dict[str, Any]:
    """Summarize the updates of the run under ``root`` from ``warmup`` on, as plain JSON.

    Seconds are wall time, rates are per second of the measured cycles. None says that a run does
    not tell: a run without a queue of finished groups knows no discarded tokens.

    Raises:
        ConfigurationError: no run is there, it is incomplete, or nothing is left to measure.
        ContractViolation: its files contradict one another or a measured update is not whole.
    """
    facts = read_run(root, warmup=warmup, allow_incomplete=allow_incomplete)
    timings = read_timings(facts, warmup)
    delivered, trained = read_delivered(facts), read_trained(facts)
    rows = [
        (stages, delivered[stages.update], trained[stages.update]) for stages in timings.updates
    ]
    for stages, got, _ in rows:
        if got.queue_wait is not None and got.queue_wait > stages.generation_wait + QUEUE_SLACK_S:
            raise ContractViolation(
                f"{facts.store.root}: update {stages.update} waited {got.queue_wait:g} s in the "
                f"queue, but only {stages.generation_wait:g} s for its collection"
            )
    inventory = facts.store.last_jsonl(layout.PIPELINE_LIFECYCLE)
    return {
        "schema_version": 1,
        "root": facts.store.root,
        **_counts(facts, timings, warmup),
        **_rates(rows),
        **_policy(rows),
        "batch_collection_breakdown": _breakdown(rows),
        "training_components_rank0": _components(rows),
        "median_seconds": {
            stage: median(getattr(stages, stage) for stages, _, _ in rows)
            for stage in UPDATE_STAGES
        },
        "all_driver_stage_seconds": dict(sorted(timings.totals.items())),
        "terminal_inventory": inventory,
        "terminal_unused_work": _unused(inventory, delivered),
        "workflow": facts.workflow,
        "per_update": [_update(row) for row in rows],
    }


def _counts(facts: RunFacts, timings: Timings, warmup: int) -> dict[str, Any]:
    return {
        "end_to_end_passed": facts.is_complete,
        "stopped_for_time": facts.stopped_for_time,
        "planned_updates": int(facts.shape["updates"]),
        "completed_updates": facts.num_updates,
        "warmup_updates": warmup,
        "measured_updates": len(timings.updates),
        "redone_updates": facts.line.redone + facts.line.undone,
        "failed_stages": timings.failed,
        "validated_trainer_ranks": len(facts.trainer_ranks),
    }


def _rates(rows: Sequence[Row]) -> dict[str, Any]:
    cycle = sum(stages.cycle for stages, _, _ in rows)
    tokens = sum(got.response_tokens for _, got, _ in rows)
    dropped = total([got.dropped for _, got, _ in rows], "response_tokens")
    return {
        "warm_cycle_seconds": cycle,
        "useful_response_tokens": tokens,
        "useful_response_tokens_per_second": tokens / cycle,
        "trainer_wait_fraction": sum(stages.generation_wait for stages, _, _ in rows) / cycle,
        "discarded_response_tokens": dropped,
        "discarded_token_fraction": (
            None if dropped is None else dropped / max(1, dropped + tokens)
        ),
    }


def _policy(rows: Sequence[Row]) -> dict[str, Any]:
    mixed = [got.mixed_responses for _, got, _ in rows]
    pairs = [did.current_tokens() for _, _, did in rows]
    active = sum(tokens for _, tokens in pairs)
    return {
        "mixed_responses": None if None in mixed else sum(value or 0 for value in mixed),
        "provenance_active_tokens": active or None,
        "current_policy_token_fraction": (
            sum(current for current, _ in pairs) / active if active else None
        ),
    }


def _breakdown(rows: Sequence[Row]) -> dict[str, float] | None:
    """Of the wait for collections: in the queue of finished groups, and the rest."""
    if any(got.queue_wait is None for _, got, _ in rows):
        return None
    cycle = sum(stages.cycle for stages, _, _ in rows)
    queue = sum(got.queue_wait or 0.0 for _, got, _ in rows)
    other = sum(
        max(0.0, stages.generation_wait - (got.queue_wait or 0.0)) for stages, got, _ in rows
    )
    return {
        "completed_queue_get_seconds": queue,
        "completed_queue_get_cycle_fraction": queue / cycle,
        "other_collection_seconds": other,
        "other_collection_cycle_fraction": other / cycle,
    }


def _components(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    scoring = [float(did.scoring[0]["seconds"]) for _, _, did in rows if 0 in did.scoring]
    steps = [float(step[0]["elapsed_seconds"]) for _, _, did in rows for step in did.steps]
    return {
        name: {
            "count": len(seconds),
            "total_seconds": sum(seconds, 0.0),
            "median_seconds": median(seconds) if seconds else None,
        }
        for name, seconds in (
            ("standalone_scoring", scoring),
            ("forward_backward_optimizer", steps),
        )
    }


def _unused(
    inventory: dict[str, Any] | None, delivered: Sequence[Delivered]
) -> dict[str, Any] | None:
    """Finished work that the end of the run left over; None unless the end says all of it."""
    if inventory is None or inventory.get("event") != "shutdown_complete":
        return None
    places = [
        inventory.get(name) for name in ("completed_queue", "producer_ready", "shutdown_unqueued")
    ]
    if not all(isinstance(place, dict) for place in places):
        return None
    found: dict[str, Any] = {}
    for kind in KINDS:
        left = sum(int(place[kind]) for place in places if place is not None)
        taken = total([got.taken for got in delivered], kind)
        stale = total([got.dropped for got in delivered], kind)
        seen = None if taken is None or stale is None else taken + stale + left
        found[kind] = {
            "remaining": left,
            "delivered": taken,
            "stale": stale,
            "remaining_fraction": left / seen if seen else None,
        }
    return found


def _update(row: Row) -> dict[str, Any]:
    stages, got, did = row
    current, active = did.current_tokens()
    return {
        "rollout_id": stages.update,
        **{f"{stage}_seconds": getattr(stages, stage) for stage in UPDATE_STAGES},
        "cycle_seconds": stages.cycle,
        "samples": got.samples,
        "response_tokens": got.response_tokens,
        "useful_response_tokens_per_second": (
            got.response_tokens / stages.cycle if stages.cycle else None
        ),
        "completed_queue_get_seconds": got.queue_wait,
        "discarded_response_tokens": None
        if got.dropped is None
        else got.dropped["response_tokens"],
        "mixed_responses": got.mixed_responses,
        "current_policy_token_fraction": current / active if active else None,
        "optimizer_steps": len(did.steps),
        "step_seconds": did.step_seconds,
    }
