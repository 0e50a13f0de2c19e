"""A rolling publication as a state machine: which engine is where, and what the router may do.

::

    serving --> draining --> updating --> serving
       |            |            |
       +------------+------------+-----> unavailable --(another engine in its place)--> updating

Pure: the plan says what is legal and what the routing table is; ``rolling`` does the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.errors import ContractViolation
from models.ports import EngineHandle
from models.publication import WeightsRef
from models.routing import EngineState, RoutedEngine, RoutingTable

NEXT: dict[EngineState, frozenset[EngineState]] = {
    EngineState.SERVING: frozenset({EngineState.DRAINING, EngineState.UNAVAILABLE}),
    EngineState.DRAINING: frozenset({EngineState.UPDATING, EngineState.UNAVAILABLE}),
    EngineState.UPDATING: frozenset({EngineState.SERVING, EngineState.UNAVAILABLE}),
    EngineState.UNAVAILABLE: frozenset(),
}
"""State -> states that the same engine may enter from it."""

Pair = tuple[int, str]
"""Policy version and weight digest."""


@dataclass(frozen=True, slots=True)
class RollingPlan:
    """The engines of a run in rank order, on their way from ``old`` pairs to the ``new`` one."""

    engines: tuple[RoutedEngine, ...]
    old: tuple[Pair, ...]
    new: Pair

    @classmethod
    def begin(
        cls, live: Sequence[EngineHandle], routed: Sequence[RoutedEngine], weights: WeightsRef
    ) -> "RollingPlan":
        """Continue from what the router routes to now.

        An engine that it does not know holds no weights that anybody confirmed: it is updating.
        """
        new = (weights.version, weights.digest)
        known = {(row.name, row.incarnation): row for row in routed}
        rows = tuple(
            known.get((each.name, each.incarnation)) or _entering(each, new) for each in live
        )
        serving = (row for row in rows if row.state is not EngineState.UPDATING)
        old = dict.fromkeys((row.version, row.digest) for row in serving)
        return cls(rows, tuple(pair for pair in old if pair != new), new)

    def row(self, name: str) -> RoutedEngine:
        """The engine as it is now; ``ContractViolation`` when there is none of that name."""
        for row in self.engines:
            if row.name == name:
                return row
        raise ContractViolation(f"{name} is no engine of this publication")

    def must_drain(self, name: str) -> bool:
        """Whether the engine may owe answers of the old pair."""
        row = self.row(name)
        holds_new = (row.version, row.digest) == self.new
        return row.state is not EngineState.UPDATING and not holds_new

    def moved(self, name: str, state: EngineState) -> "RollingPlan":
        """The engine enters ``state``; it serves again only with the new pair.

        Raises:
            ContractViolation: the state cannot be entered from the present one.
        """
        row = self.row(name)
        if state not in NEXT[row.state]:
            raise ContractViolation(f"{name} cannot go from {row.state} to {state}")
        changes: dict[str, object] = {"state": state}
        if state is EngineState.SERVING:
            changes |= {"version": self.new[0], "digest": self.new[1]}
        return self._with(row.model_copy(update=changes))

    def replaced(self, engine: EngineHandle) -> "RollingPlan":
        """Another engine stands in the place of an unavailable one and is updating.

        Raises:
            ContractViolation: the one before is not unavailable, or it is the same one.
        """
        before = self.row(engine.name)
        is_other = (before.incarnation, before.url) != (engine.incarnation, engine.url)
        if before.state is not EngineState.UNAVAILABLE or not is_other:
            raise ContractViolation(
                f"{engine.name} is {before.state} as incarnation {before.incarnation} and cannot "
                f"be replaced by incarnation {engine.incarnation}"
            )
        return self._with(_entering(engine, self.new))

    @property
    def table(self) -> RoutingTable:
        """Both pairs are committed: some engines serve the old one, some the new one."""
        return RoutingTable(engines=self.engines, committed=(*self.old, self.new))

    def _with(self, changed: RoutedEngine) -> "RollingPlan":
        rows = tuple(changed if row.name == changed.name else row for row in self.engines)
        return replace(self, engines=rows)


def _entering(engine: EngineHandle, new: Pair) -> RoutedEngine:
    return RoutedEngine(
        name=engine.name,
        url=engine.url,
        incarnation=engine.incarnation,
        version=new[0],
        digest=new[1],
        state=EngineState.UPDATING,
    )
