"""Tokens that reached the trainer and those that did not, update by update.

Fully async runs tell in ``rollout_flow.jsonl``; other runs in the manifests of their collections,
which know nothing of waits in a queue or of dropped tokens: these are None there, never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from activities.analysis.run_facts import RunFacts, duration, number
from activities.rollout.queue_metrics import PREFIX, QUEUE_PREFIX
from activities.storage import layout
from models.errors import ContractViolation

KINDS = ("groups", "samples", "response_tokens")


@dataclass(frozen=True, slots=True)
class Delivered:
    """What one update trained on."""

    samples: int
    response_tokens: int
    queue_wait: float | None = None
    """Seconds that the collection waited for finished groups; none when nobody says."""
    mixed_responses: int | None = None
    """Responses of several policy versions."""
    taken: Mapping[str, int] | None = None
    """Groups, samples and response tokens that left the queue for the trainer; None without one."""
    dropped: Mapping[str, int] | None = None
    """Those that left it otherwise."""
    counters: Mapping[str, float] | None = None
    """Counts and ages of the queue of finished groups, under short names."""


def read_delivered(facts: RunFacts) -> list[Delivered]:
    """What each update of the final line trained on.

    Raises:
        ContractViolation: a collection is unknown, its counters are missing or contradict it.
    """
    if facts.is_fully_async:
        return _from_flow(facts)
    return [_from_manifest(facts, index) for index in range(facts.num_updates)]


def _from_manifest(facts: RunFacts, index: int) -> Delivered:
    manifest = facts.line.updates[index].manifest
    if manifest is None:
        raise ContractViolation(
            f"{facts.store.root}: the collection of update {index} is in none of {layout.ROLLOUTS}/"
        )
    counts = manifest.collection.counts
    return Delivered(samples=counts.samples, response_tokens=counts.response_tokens)


def _from_flow(facts: RunFacts) -> list[Delivered]:
    where = f"{facts.store.root}/{layout.ROLLOUT_FLOW}"
    last: dict[int, dict[str, Any]] = {}
    for row in facts.store.read_jsonl(layout.ROLLOUT_FLOW).rows:
        last[int(row["rollout_id"])] = row
    missing = sorted(set(range(facts.num_updates)) - set(last))
    if missing:
        raise ContractViolation(f"{where} has no row of rollout_id {missing[0]}")
    more = sorted(set(last) - set(range(facts.num_updates)))
    if more:
        facts.refuse(f"{layout.ROLLOUT_FLOW} has rollout_id {more[0]}, which no update trained on")
    return [_of_row(last[update], where) for update in range(facts.num_updates)]


def _of_row(row: Mapping[str, Any], where: str) -> Delivered:
    update = row["rollout_id"]
    metrics: Mapping[str, Any] = row.get("queue_metrics") or {}
    taken = _counts(metrics, "delivered", where, update)
    dropped = _counts(metrics, "dropped", where, update)
    if taken["response_tokens"] != row["response_tokens"]:
        raise ContractViolation(
            f"{where}: rollout_id {update} delivered {taken['response_tokens']} response tokens, "
            f"but its samples have {row['response_tokens']}"
        )
    wait = metrics.get(f"{QUEUE_PREFIX}consumer_wait_seconds")
    what = f"{where}: queue wait of rollout_id {update}"
    return Delivered(
        samples=int(row["samples"]),
        response_tokens=int(row["response_tokens"]),
        queue_wait=None if wait is None else duration(wait, what),
        mixed_responses=row.get("mixed_responses"),
        taken=taken,
        dropped=dropped,
        counters=_counters(metrics),
    )


def _counts(metrics: Mapping[str, Any], way: str, where: str, update: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind in KINDS:
        value = number(metrics.get(f"{QUEUE_PREFIX}{way}_{kind}"))
        if value is None:
            raise ContractViolation(
                f"{where}: rollout_id {update} lacks the counter {QUEUE_PREFIX}{way}_{kind}"
            )
        found[kind] = int(value)
    return found


def _counters(metrics: Mapping[str, Any]) -> dict[str, float]:
    """``rollout/fully_async/X`` -> ``X``, without the histograms."""
    return {
        name.removeprefix(PREFIX): value
        for name, text in metrics.items()
        if name.startswith(PREFIX) and "_by_" not in name and (value := number(text)) is not None
    }


def total(rows: Sequence[Mapping[str, int] | None], kind: str) -> int | None:
    """Sum of one kind over ``rows``; None when a row is unknown."""
    if any(row is None for row in rows):
        return None
    return sum(row[kind] for row in rows if row is not None)
