"""The state machine of a rolling publication: every transition, and the table in every state."""

import itertools

import pytest

from activities.rolling_plan import RollingPlan
from models.errors import ContractViolation
from models.ports import EngineHandle
from models.publication import WeightsRef
from models.routing import EngineState, RoutedEngine

SERVING, DRAINING, UPDATING, UNAVAILABLE = EngineState
OLD, NEW = (3, "old"), (4, "new")
LEGAL = {
    (SERVING, DRAINING), (SERVING, UNAVAILABLE), (DRAINING, UPDATING), (DRAINING, UNAVAILABLE),
    (UPDATING, SERVING), (UPDATING, UNAVAILABLE),
}  # fmt: skip
WEIGHTS = WeightsRef(
    version=4, path="mem/4", digest="new", num_tensors=1, num_bytes=8, dtype="float32"
)


def handle(rank: int, incarnation: int = 0) -> EngineHandle:
    name = f"engine-{rank}"
    return EngineHandle(name=name, url=f"http://{name}.{incarnation}", incarnation=incarnation)


def row(rank: int, state: EngineState = SERVING, pair: tuple[int, str] = OLD) -> RoutedEngine:
    each = handle(rank)
    return RoutedEngine(
        **each.model_dump(exclude={"gpus"}), version=pair[0], digest=pair[1], state=state
    )


def plan_of(*rows: RoutedEngine) -> RollingPlan:
    return RollingPlan.begin([handle(rank) for rank in range(len(rows))], rows, WEIGHTS)


@pytest.mark.parametrize("path", [*itertools.product(EngineState, EngineState)])
def test_only_the_named_transitions_are_legal(path: tuple[EngineState, EngineState]) -> None:
    before, after = path
    plan = plan_of(row(0, before), row(1))
    if path in LEGAL:
        assert plan.moved("engine-0", after).row("engine-0").state is after
    else:
        with pytest.raises(ContractViolation, match=f"engine-0 cannot go from {before} to {after}"):
            plan.moved("engine-0", after)


def test_both_pairs_are_committed_and_engines_serve_the_new_one_when_they_serve_again() -> None:
    plan = plan_of(row(0), row(1))
    assert plan.table.committed == (OLD, NEW)
    for state in (DRAINING, UPDATING):
        plan = plan.moved("engine-0", state)
        assert (plan.row("engine-0").version, plan.row("engine-0").digest) == OLD
    plan = plan.moved("engine-0", SERVING)
    pairs = [(each.version, each.digest) for each in plan.table.engines]
    assert pairs == [NEW, OLD]
    assert plan.table.committed == (OLD, NEW)


def test_an_unavailable_engine_only_returns_as_another_process() -> None:
    plan = plan_of(row(0), row(1)).moved("engine-0", DRAINING).moved("engine-0", UNAVAILABLE)
    with pytest.raises(ContractViolation, match="cannot be replaced by incarnation 0"):
        plan.replaced(handle(0))
    plan = plan.replaced(handle(0, incarnation=1))
    assert plan.row("engine-0").state is UPDATING
    assert plan.row("engine-0").incarnation == 1
    with pytest.raises(ContractViolation, match="engine-0 is updating"):
        plan.replaced(handle(0, incarnation=2))


def test_an_engine_that_the_router_does_not_know_is_updating_and_owes_nothing() -> None:
    live = [handle(0), handle(1, incarnation=1)]
    plan = RollingPlan.begin(live, [row(0), row(1)], WEIGHTS)
    assert [each.state for each in plan.engines] == [SERVING, UPDATING]
    assert [each.incarnation for each in plan.engines] == [0, 1]
    assert [plan.must_drain(each.name) for each in live] == [True, False]


def test_a_plan_that_was_cut_off_is_continued() -> None:
    plan = plan_of(row(0, SERVING, NEW), row(1, DRAINING), row(2, UPDATING), row(3))
    assert [plan.must_drain(f"engine-{rank}") for rank in range(4)] == [False, True, False, True]
    assert plan.table.committed == (OLD, NEW)


def test_a_name_of_no_engine_is_refused() -> None:
    with pytest.raises(ContractViolation, match="engine-7 is no engine"):
        plan_of(row(0)).moved("engine-7", DRAINING)
