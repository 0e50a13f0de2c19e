"""What the trainer's processes say that they did, from ``training_contract_rankR.jsonl``.

Every process writes an ``optimizer`` event for every step. Which steps an update took is told by
the policy versions of the final line; each rank must have an event for exactly those.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from activities.analysis.run_facts import RunFacts, duration
from activities.storage import layout
from models.errors import ContractViolation


@dataclass(slots=True)
class TrainedUpdate:
    """Events of one update, last try, over all ranks."""

    steps: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    """For each optimizer step: rank -> its ``optimizer`` event."""
    scoring: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> its ``score_timing`` event; empty without a scoring pass."""
    refresh: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> its ``refresh_scores`` event; empty in other publication modes."""

    @property
    def step_seconds(self) -> float:
        """Seconds of the update's steps, each that of its slowest rank."""
        return sum(
            max(
                duration(event.get("elapsed_seconds"), "elapsed_seconds") for event in step.values()
            )
            for step in self.steps
        )

    @property
    def scoring_seconds(self) -> float | None:
        """Seconds of the scoring pass of the slowest rank; none without one."""
        seconds = [duration(row.get("seconds"), "score_timing") for row in self.scoring.values()]
        return max(seconds, default=None)

    def normalized(self, name: str) -> int:
        """Sum over the steps of a count of ``normalization``, which is of all ranks together."""
        return sum(int(next(iter(step.values()))["normalization"][name]) for step in self.steps)

    def current_tokens(self) -> tuple[float, int]:
        """(Active tokens of the current policy, active tokens), over ranks."""
        rows = self.refresh.values()
        return (
            sum(row["current_version_token_fraction"] * row["active_tokens"] for row in rows),
            sum(int(row["active_tokens"]) for row in rows),
        )


def read_trained(facts: RunFacts) -> list[TrainedUpdate]:
    """Events of every update of the final line.

    Raises:
        ContractViolation: a rank's file or an optimizer step is missing, is there twice, or was
            rejected.
    """
    updates = [TrainedUpdate() for _ in facts.line.updates]
    bounds: list[tuple[int, int]] | None = None
    for rank in facts.trainer_ranks:
        rel = layout.training_contract(rank)
        rows = facts.store.read_jsonl(rel).rows
        if not rows:
            raise ContractViolation(f"{facts.store.root}/{rel} is missing or empty")
        events = _last_events(facts, rel, rows)
        if bounds is None:
            bounds = _step_bounds(facts, events)
        for index, (first, last) in enumerate(bounds):
            updates[index].steps += [{} for _ in range(last - first - len(updates[index].steps))]
            for step in range(first, last):
                event = events.pop(("optimizer", index, step + 1), None)
                if event is None:
                    raise ContractViolation(
                        f"{facts.store.root}/{rel}: optimizer step {step + 1} of update {index} "
                        "is missing"
                    )
                updates[index].steps[step - first][rank] = event
        _take(events, "score_timing", rank, [update.scoring for update in updates])
        _take(events, "refresh_scores", rank, [update.refresh for update in updates])
        for name, index, step in events:
            if name == "optimizer":
                facts.refuse(f"{rel}: step {step} of update {index} is not in the final line")
    return updates


Place = tuple[str, int, int]


def _last_events(
    facts: RunFacts, rel: str, rows: Iterable[dict[str, Any]]
) -> dict[Place, dict[str, Any]]:
    """(event, update, step or 0) -> the last one."""
    events: dict[Place, dict[str, Any]] = {}
    for row in rows:
        name = row.get("event")
        if name == "optimizer_rejected" or (name == "optimizer" and row.get("optimizer_skipped")):
            facts.refuse(f"{rel}: optimizer step {row.get('step')} was not taken")
            continue
        if name not in ("optimizer", "score_timing", "refresh_scores"):
            continue
        step = int(row["step"]) if name == "optimizer" else 0
        place = name, int(row["rollout_id"]), step
        if name == "optimizer" and place in events:
            facts.refuse(f"{rel}: optimizer step {step} was done more than once")
        events[place] = row
    return events


def _step_bounds(facts: RunFacts, events: Iterable[Place]) -> list[tuple[int, int]]:
    """For each update the optimizer steps before and after it."""
    seen: dict[int, list[int]] = {}
    for name, update, step in events:
        if name == "optimizer":
            seen.setdefault(update, []).append(step)
    bounds, before = [], 0
    for place in facts.line.updates:
        after = place.policy_version
        if after is None:  # its report was lost with a worker: the trainer's own rows tell
            facts.refuse(f"update {place.update} has no row in {layout.UPDATES}")
            after = max(seen.get(place.update, ()), default=before)
        bounds.append((before, after))
        before = after
    return bounds


def _take(
    events: dict[Place, dict[str, Any]],
    name: str,
    rank: int,
    targets: list[dict[int, dict[str, Any]]],
) -> None:
    for index, target in enumerate(targets):
        event = events.get((name, index, 0))
        if event is not None:
            target[rank] = event
