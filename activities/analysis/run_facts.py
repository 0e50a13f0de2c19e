"""What the analysis tools must know of a run before they measure it: its plan, its end, its line.

Analyses count the updates of the final line. By default they take runs that are complete (a soft
deadline is a completion) and that did every stage once: a run that recovered from a loss has rows
of work that was undone. With ``allow_incomplete`` the last try of each update counts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from activities.analysis.evidence import read_evidence
from activities.analysis.line import FinalLine, final_line
from activities.storage import layout
from activities.storage.store import Store
from models.errors import ConfigurationError, ContractViolation
from models.run import RunState

REMEDY = "--allow-incomplete (allow_incomplete=True) analyzes the last try of each update"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run as far as every analysis needs it."""

    store: Store
    workflow: dict[str, Any]
    """``workflow.json``."""
    plan: dict[str, Any]
    """``plan.json``."""
    line: FinalLine
    allow_incomplete: bool

    @property
    def num_updates(self) -> int:
        """Updates of the final line."""
        return len(self.line.updates)

    @property
    def is_complete(self) -> bool:
        """Whether the horizon or the soft deadline was reached."""
        return self.workflow.get("status") == RunState.COMPLETE.value

    @property
    def stopped_for_time(self) -> bool:
        """Whether the soft deadline ended it."""
        return bool((self.workflow.get("result") or {}).get("stopped_for_time"))

    @property
    def is_fully_async(self) -> bool:
        """Whether a producer sampled without being asked."""
        return bool(self.shape["fully_async"])

    @property
    def overlaps(self) -> bool:
        """Whether collections were sampled while the update before trained."""
        return bool(self.shape["overlapped"])

    @property
    def shape(self) -> dict[str, Any]:
        """``runtime.shape`` of the plan."""
        shape: dict[str, Any] = self.plan["runtime"]["shape"]
        return shape

    @property
    def trainer_ranks(self) -> range:
        """Ranks of the trainer's processes."""
        return range(int(self.plan["allocation"]["trainer_processes"]))

    def refuse(self, what: str) -> None:
        """Raise ``ContractViolation`` unless incomplete runs are allowed."""
        if not self.allow_incomplete:
            raise ContractViolation(f"{self.store.root}: {what}; {REMEDY}")


def read_run(root: str, *, warmup: int, allow_incomplete: bool = False) -> RunFacts:
    """Read the run under ``root``.

    Args:
        root: the run's ``output.root``.
        warmup: first updates that are not measured.
        allow_incomplete: also take a run that is not complete or did work again.

    Raises:
        ConfigurationError: no run is there, it is not complete, or nothing is left to measure.
        ContractViolation: it is complete and has other than the planned number of updates.
    """
    if warmup < 0:
        raise ConfigurationError(f"warmup is {warmup}; it counts updates, so give 0 or more")
    store = Store(root)
    line = final_line(read_evidence(store))
    facts = RunFacts(
        store=store,
        workflow=_document(store, layout.WORKFLOW_JSON, lambda found: "status" in found),
        plan=_document(store, layout.PLAN_JSON, _is_plan),
        line=line,
        allow_incomplete=allow_incomplete,
    )
    if not facts.is_complete and not allow_incomplete:
        raise ConfigurationError(
            f"{store.root}: the run is {facts.workflow['status']}, not complete; {REMEDY}"
        )
    planned = int(facts.shape["updates"])
    if facts.is_complete and not facts.stopped_for_time and facts.num_updates != planned:
        facts.refuse(f"{facts.num_updates} of {planned} planned updates are in the final line")
    if line.redone or line.undone:
        facts.refuse(f"{line.redone + line.undone} updates were undone by a rebuild")
    if warmup >= facts.num_updates:
        raise ConfigurationError(
            f"{store.root}: the run has {facts.num_updates} updates, a warmup of {warmup} leaves "
            "none to measure; give a smaller one"
        )
    return facts


def duration(value: Any, what: str) -> float:
    """``value`` as seconds. Raises ``ContractViolation`` unless finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ContractViolation(f"{what} is {value!r}, no number of seconds")
    if not math.isfinite(value) or value < 0:
        raise ContractViolation(f"{what} is {value}; a duration is finite and not negative")
    return float(value)


def number(value: Any) -> float | None:
    """``value`` as a finite number; None for anything else, and for what is missing."""
    if value is None or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _is_plan(found: Any) -> bool:
    needed = {"updates", "fully_async", "overlapped"}
    return needed <= set(found["runtime"]["shape"]) and found["allocation"]["trainer_processes"] > 0


def _document(store: Store, rel: str, is_right: Callable[[Any], bool]) -> dict[str, Any]:
    try:
        found = store.read_json(rel)
        right = isinstance(found, dict) and is_right(found)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{store.root}/{rel} is missing; name the output.root of a run"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ContractViolation(f"{store.root}/{rel} cannot be read: {error}") from error
    if not right:
        raise ContractViolation(f"{store.root}/{rel} is not what a run writes")
    document: dict[str, Any] = found
    return document
