"""Decisions of the training loop, against the rules of the guide written out as tables."""

import pytest

from models.checkpoint import CheckpointRef
from models.run import LoopPlan, RunProgress, RunState, StopRequest
from workflows import loop
from workflows.loop import Step


def plan(**changes: object) -> LoopPlan:
    return LoopPlan.model_validate({"num_rollouts": 5, "save_interval": 5, **changes})


def progress(done: int = 0, **changes: object) -> RunProgress:
    """A run whose ``done`` updates took one step each and are published."""
    values = {
        "state": RunState.TRAINING,
        "next_update": done,
        "policy_version": done,
        "published_version": done,
        "last_evaluated_update": -1,
        **changes,
    }
    return RunProgress.model_validate(values)


def committed(update: int) -> CheckpointRef:
    return CheckpointRef(update=update, policy_version=update + 1, folder="f", marker_sha256="")


@pytest.mark.parametrize(
    ("interval", "total", "saved"),
    [
        # (id + 1) % interval == 0, or the last
        (2, 5, [2, 4, 5]),
        (5, 5, [5]),
        (1, 3, [1, 2, 3]),
        (4, 10, [4, 8, 10]),
        (None, 3, [3]),
    ],
)
def test_checkpoint_cadence(interval: int | None, total: int, saved: list[int]) -> None:
    the_plan = plan(num_rollouts=total, save_interval=interval)
    due = [done for done in range(total + 1) if loop.checkpoint_due(the_plan, progress(done))]
    assert due == saved


def test_a_committed_update_is_not_committed_again() -> None:
    assert not loop.checkpoint_due(plan(save_interval=1), progress(3, checkpoint=committed(2)))
    assert loop.checkpoint_due(plan(save_interval=1), progress(3, checkpoint=committed(1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": StopRequest()},
        {"checkpoint_requests": 1},
        {"stopped_for_time": True},
    ],
)
def test_what_forces_a_checkpoint(changes: dict[str, object]) -> None:
    assert loop.checkpoint_due(plan(), progress(2, **changes))
    assert not loop.checkpoint_due(plan(), progress(0, **changes)), "nothing is trained yet"
    assert not loop.checkpoint_due(plan(save_checkpoints=False), progress(2, **changes))


def test_a_stop_without_checkpoint_forces_none() -> None:
    assert not loop.checkpoint_due(plan(), progress(2, stop=StopRequest(checkpoint=False)))


@pytest.mark.parametrize(
    ("plan_changes", "phases"),
    [
        ({"eval_initial": True, "eval_final": True, "eval_interval": 2, "num_rollouts": 5},
         {0: "initial", 2: "periodic", 4: "periodic", 5: "final"}),
        ({"eval_initial": False, "eval_final": True, "num_rollouts": 3}, {3: "final"}),
        ({"eval_initial": True, "eval_final": False, "num_rollouts": 3}, {0: "initial"}),
        ({"eval_interval": 2, "eval_final": False, "num_rollouts": 4},
         {2: "periodic", 4: "periodic"}),
        ({"num_rollouts": 4}, {}),
    ],
)  # fmt: skip
def test_evaluation_cadence(plan_changes: dict[str, object], phases: dict[int, str]) -> None:
    the_plan = plan(**plan_changes)
    found = {
        done: phase
        for done in range(the_plan.num_rollouts + 1)
        if (phase := loop.evaluation_phase(the_plan, progress(done))) is not None
    }
    assert found == phases


def test_milestones_of_two_task_sets() -> None:
    """Six updates, one set every second and one every third: due at 0, 2, 3, 4 and 6."""
    due = {
        done
        for interval in (2, 3)
        for done in range(7)
        if loop.evaluation_phase(
            plan(num_rollouts=6, eval_initial=True, eval_final=True, eval_interval=interval),
            progress(done),
        )
    }
    assert due == {0, 2, 3, 4, 6}


def test_an_evaluation_is_done_once() -> None:
    the_plan = plan(eval_initial=True)
    assert loop.evaluation_phase(the_plan, progress(0, last_evaluated_update=0)) is None


def test_final_evaluation_follows_the_deadline() -> None:
    late = progress(2, stopped_for_time=True)
    assert loop.evaluation_phase(plan(eval_final=True), late) == "final"


def test_deadline_is_an_absolute_time() -> None:
    assert not loop.deadline_reached(progress(), now=1e12)
    limited = progress(deadline_unix=100.0)
    assert not loop.deadline_reached(limited, now=99.9)
    assert loop.deadline_reached(limited, now=100.0)


@pytest.mark.parametrize(
    ("lag", "steps", "overlapped"), [(0, 1, False), (1, 1, True), (2, 2, False), (3, 2, True)]
)
def test_overlap_needs_a_lag_of_one_collection(lag: int, steps: int, overlapped: bool) -> None:
    assert loop.overlaps(plan(max_policy_lag=lag, steps_per_update=steps)) is overlapped


def test_nothing_is_sampled_ahead_of_an_end() -> None:
    the_plan = plan(max_policy_lag=1)
    assert loop.collects_ahead(the_plan, progress(0), now=0.0)
    assert not loop.collects_ahead(the_plan, progress(4), now=0.0), "update 4 is the last"
    assert not loop.collects_ahead(the_plan, progress(0, paused=True), now=0.0)
    assert not loop.collects_ahead(the_plan, progress(0, stop=StopRequest()), now=0.0)
    assert not loop.collects_ahead(the_plan, progress(0, deadline_unix=5.0), now=6.0)


def steps_of(the_plan: LoopPlan) -> list[str]:
    """Play a run in which every step succeeds; an update takes one optimizer step."""
    now, played = progress(0, published_version=-1), []
    while (step := loop.next_step(the_plan, now)) is not Step.COMPLETE:
        done = now.next_update
        match step:
            case Step.PUBLISH:
                played.append(f"publish {now.policy_version}")
                now = now.model_copy(update={"published_version": now.policy_version})
            case Step.CHECKPOINT:
                played.append(f"checkpoint {done}")
                now = now.model_copy(update={"checkpoint": committed(done - 1)})
            case Step.EVALUATE:
                played.append(f"evaluate {done}")
                now = now.model_copy(update={"last_evaluated_update": done})
            case Step.EXPORT:
                played.append("export")
                now = now.model_copy(update={"export_uri": "x"})
            case Step.UPDATE:
                played.append(f"update {done}")
                changes = {"next_update": done + 1, "policy_version": now.policy_version + 1}
                now = now.model_copy(update=changes)
            case _:
                raise AssertionError(step)
    return played


def test_a_run_from_begin_to_end() -> None:
    the_plan = plan(
        num_rollouts=3, save_interval=2, eval_interval=2, eval_initial=True, eval_final=True,
        export_hf=True,
    )  # fmt: skip
    # publication, then checkpoint, then evaluation, as a barrier publication has it
    assert steps_of(the_plan) == [
        "publish 0", "evaluate 0",
        "update 0", "publish 1",
        "update 1", "publish 2", "checkpoint 2", "evaluate 2",
        "update 2", "publish 3", "checkpoint 3", "evaluate 3",
        "export",
    ]  # fmt: skip


def test_stop_goes_before_everything_but_its_checkpoint() -> None:
    stopping = progress(2, stop=StopRequest())
    assert loop.next_step(plan(), stopping) is Step.CHECKPOINT
    stopping = progress(2, stop=StopRequest(), checkpoint=committed(1))
    assert loop.next_step(plan(eval_interval=2), stopping) is Step.STOP
    unpublished = progress(2, stop=StopRequest(checkpoint=False), published_version=1)
    assert loop.next_step(plan(), unpublished) is Step.STOP


def test_pause_holds_only_the_next_update() -> None:
    assert loop.next_step(plan(), progress(2, paused=True)) is Step.PAUSE
    assert loop.next_step(plan(eval_interval=2), progress(2, paused=True)) is Step.EVALUATE
    waiting = progress(2, paused=True, checkpoint_requests=1)
    assert loop.next_step(plan(), waiting) is Step.CHECKPOINT


@pytest.mark.parametrize(
    ("chain", "checkpointed", "suggested", "due"),
    [
        (9, True, False, False),
        (10, True, False, True),
        (10, False, False, False),
        (19, False, False, False),
        (20, False, False, True),
        (1, False, True, True),
        (0, False, True, False),
    ],
)
def test_continue_as_new_prefers_a_checkpoint_boundary(
    chain: int, checkpointed: bool, suggested: bool, due: bool
) -> None:
    the_plan = plan(num_rollouts=100, continue_as_new_updates=10)
    now = progress(30, checkpoint=committed(29) if checkpointed else None)
    found = loop.continue_as_new_due(the_plan, now, chain_updates=chain, suggested=suggested)
    assert found is due


def test_trend_window_is_bounded() -> None:
    rewards: tuple[float, ...] = ()
    for value in range(100):
        rewards = loop.recent_rewards(rewards, float(value))
    assert rewards == tuple(float(value) for value in range(60, 100))


def test_seconds_per_update_is_an_exponential_mean() -> None:
    assert loop.smoothed(0.0, 4.0) == 4.0
    assert loop.smoothed(4.0, 14.0) == pytest.approx(0.7 * 4 + 0.3 * 14)
