"""Whether a run is complete, proved from its root alone: every count, marker and checksum.

Pure reading. Each check gathers evidence and the flaws that speak against completion; a run is
complete only when no check has a flaw. What a server says about the workflow, and whether the
export loads, is asked by whoever has a server and a model library.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from activities.analysis.evidence import Evidence, read_evidence
from activities.analysis.line import FinalLine, final_line
from activities.storage import layout
from activities.storage.store import Store
from configs.load import resolve_document
from configs.plan import loop_plan
from configs.run import RunSpec
from models.errors import ConfigurationError, PerdureError
from models.run import LoopPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flaw:
    """Something that keeps a run from being proved complete."""

    path: str
    """File, folder or other place, absolute."""
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Check:
    """One claim about a run with its evidence."""

    name: str
    evidence: str
    flaws: tuple[Flaw, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.flaws


@dataclass(slots=True)
class Root:
    """What the checks read in common."""

    store: Store
    evidence: Evidence
    line: FinalLine
    state: dict[str, Any] | None
    """``workflow.json``; none when missing or unreadable."""
    document: dict[str, Any] | None
    """``run-spec.json`` as recorded; none when missing or unreadable."""
    spec: RunSpec | None
    """The recorded run file resolved; none when this version refuses it."""
    plan: LoopPlan | None
    unreadable: dict[str, str] = field(default_factory=dict)
    """File -> why it could not be read."""
    forked_at: int = 0
    """Finished updates that a forked run began with; what it owes begins there."""

    def path(self, rel: str) -> str:
        """``rel`` for people: absolute, or a URL."""
        return f"{self.store.root}/{rel}"

    @property
    def expected_updates(self) -> int | None:
        """Updates of a complete run; fewer than planned after a soft deadline. None: unknown."""
        result = (self.state or {}).get("result")
        if isinstance(result, dict) and result.get("stopped_for_time"):
            return int((self.state or {}).get("update", 0))
        return None if self.plan is None else self.plan.num_rollouts


def read_root(root: str) -> Root:
    """Read what the checks share.

    Raises:
        ConfigurationError: nothing under ``root`` was written by a run.
    """
    store = Store(root)
    evidence = read_evidence(store)
    unreadable: dict[str, str] = {}
    state = _object(store, layout.WORKFLOW_JSON, unreadable)
    document = _object(store, layout.RESOLVED_CONFIG, unreadable)
    spec = None
    if document is not None:
        try:
            spec = resolve_document(document, origin=layout.RESOLVED_CONFIG).spec
        except ConfigurationError as error:
            unreadable[layout.RESOLVED_CONFIG] = error.message.splitlines()[0]
    plan = None if spec is None else loop_plan(spec)
    fork = _object(store, layout.FORK_JSON, {}) or {}
    forked_at = fork.get("updates") or 0
    line = final_line(evidence)
    return Root(store, evidence, line, state, document, spec, plan, unreadable, forked_at)


def file_flaws(
    root: Root, rel: str, num_bytes: int | None, sha256: str | None, remedy: str
) -> Iterator[Flaw]:
    """What is wrong with the file ``rel``: missing, of another size, or of other content."""
    where = root.path(rel)
    try:
        size = root.store.size(rel)
        if num_bytes is not None and size != num_bytes:
            yield Flaw(where, f"torn: {size} bytes instead of the recorded {num_bytes}", remedy)
        elif sha256 is not None and (found := root.store.sha256(rel)) != sha256:
            yield Flaw(where, f"other content: SHA-256 {found}, recorded {sha256}", remedy)
    except FileNotFoundError:
        yield Flaw(where, "missing", remedy)
    except OSError as error:
        yield Flaw(where, f"cannot be read: {error}", remedy)


def try_read(read: Callable[[], T]) -> T | str:
    """The result of ``read``, or why there is none, in words."""
    try:
        return read()
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, KeyError, TypeError, PerdureError) as error:
        text = error.message if isinstance(error, PerdureError) else str(error)
        return f"cannot be read: {text.splitlines()[0] if text else type(error).__name__}"


def numbers(values: list[int]) -> str:
    """``0 to 3, 7`` of [0, 1, 2, 3, 7]; ``none`` of []."""
    parts: list[str] = []
    start = 0
    for index, value in enumerate(values):
        if index + 1 < len(values) and values[index + 1] == value + 1:
            continue
        first = values[start]
        joint = ", " if value == first + 1 else " to "
        parts.append(str(value) if value == first else f"{first}{joint}{value}")
        start = index + 1
    return ", ".join(parts) or "none"


def recorded_names(store: Store, folder: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """Names in ``folder`` that ``pattern`` matches wholly."""
    matches = map(pattern.fullmatch, store.list(folder))
    return [match for match in matches if match is not None]


def _object(store: Store, rel: str, unreadable: dict[str, str]) -> dict[str, Any] | None:
    try:
        value = store.read_json(rel)
    except FileNotFoundError:
        unreadable[rel] = "missing"
    except (OSError, PerdureError) as error:
        unreadable[rel] = str(error).splitlines()[0]
    else:
        if isinstance(value, dict):
            return value
        unreadable[rel] = "not a JSON object"
    return None
