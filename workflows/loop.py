"""What is due next: pure functions of (LoopPlan, RunProgress, now). No Temporal, no clock.

The order within one update u, with N = u + 1 finished updates after it::

    sequential (max_policy_lag < 2K - 1)   overlapped (max_policy_lag >= 2K - 1)
    collect(u)                             collect(u) was sampled during optimize(u - 1)
    optimize(u)                            optimize(u) beside collect(u + 1), both awaited
    publish                                publish
    checkpoint, if due                     checkpoint, if due
    evaluate, if due                       evaluate, if due

Every step but the update itself is derived from what progress says is missing, so the same
function finds the right continuation after a recovery, a resume or a continue-as-new.
"""

from enum import StrEnum

from models.run import LoopPlan, RunProgress

RECENT_REWARDS = 40
"""Rewards that travel with the progress, for the trend."""

_SMOOTHING = 0.3
"""Weight of the newest update in the mean seconds per update."""


class Step(StrEnum):
    """What the workflow does next."""

    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"
    STOP = "stop"
    EVALUATE = "evaluate"
    EXPORT = "export"
    COMPLETE = "complete"
    CONTINUE_AS_NEW = "continue as new"
    PAUSE = "paused"
    UPDATE = "update"


def next_step(
    plan: LoopPlan, progress: RunProgress, *, chain_updates: int = 0, suggested: bool = False
) -> Step:
    """The next step of a run whose fleet is up.

    Args:
        plan: what the run file asks for.
        progress: what is done.
        chain_updates: updates done by this workflow run since it last continued as new.
        suggested: the server suggests to continue as new.
    """
    checkpoint = checkpoint_due(plan, progress)
    if progress.stop is not None and not checkpoint:
        return Step.STOP
    if progress.published_version != progress.policy_version:
        return Step.PUBLISH
    if checkpoint:
        return Step.CHECKPOINT
    if evaluation_phase(plan, progress) is not None:
        return Step.EVALUATE
    if ends(plan, progress):
        return Step.EXPORT if plan.export_hf and progress.export_uri is None else Step.COMPLETE
    if continue_as_new_due(plan, progress, chain_updates=chain_updates, suggested=suggested):
        return Step.CONTINUE_AS_NEW
    return Step.PAUSE if progress.paused else Step.UPDATE


def ends(plan: LoopPlan, progress: RunProgress) -> bool:
    """Whether no further update follows: the horizon or the deadline is reached."""
    return progress.next_update >= plan.num_rollouts or progress.stopped_for_time


def deadline_reached(progress: RunProgress, now: float) -> bool:
    """Whether the soft deadline has passed at ``now`` (Unix seconds); asked after an update."""
    return progress.deadline_unix is not None and now >= progress.deadline_unix


def checkpoint_due(plan: LoopPlan, progress: RunProgress) -> bool:
    """Whether the finished updates must be committed before anything else happens."""
    done = progress.next_update
    if not plan.save_checkpoints or done == 0 or is_committed(progress):
        return False
    periodic = plan.save_interval is not None and done % plan.save_interval == 0
    stopping = progress.stop is not None and progress.stop.checkpoint
    return periodic or stopping or progress.checkpoint_requests > 0 or ends(plan, progress)


def is_committed(progress: RunProgress) -> bool:
    """Whether the newest checkpoint holds every finished update."""
    reference = progress.checkpoint
    return reference is not None and reference.update == progress.next_update - 1


def evaluation_phase(plan: LoopPlan, progress: RunProgress) -> str | None:
    """``initial``, ``periodic`` or ``final`` when an evaluation is due now, else None."""
    done = progress.next_update
    if progress.last_evaluated_update == done:
        return None
    if ends(plan, progress) and plan.eval_final:
        return "final"
    if done == 0:
        return "initial" if plan.eval_initial else None
    periodic = plan.eval_interval is not None and done % plan.eval_interval == 0
    return "periodic" if periodic else None


def continue_as_new_due(
    plan: LoopPlan, progress: RunProgress, *, chain_updates: int, suggested: bool
) -> bool:
    """Whether to start a fresh history here.

    A checkpoint boundary is preferred. Twice the cadence, or the server's own suggestion, does not
    wait for one: without a checkpoint cadence none would come.
    """
    limit = plan.continue_as_new_updates
    if suggested and chain_updates > 0:
        return True
    return chain_updates >= (limit if is_committed(progress) else 2 * limit)


def overlaps(plan: LoopPlan) -> bool:
    """Whether the lag bound lets a collection be sampled one update ahead."""
    return not plan.fully_async and plan.max_policy_lag >= 2 * plan.steps_per_update - 1


def collects_ahead(plan: LoopPlan, progress: RunProgress, now: float) -> bool:
    """Whether to sample the next collection while the current one is trained."""
    return (
        overlaps(plan)
        and progress.next_update + 1 < plan.num_rollouts
        and progress.stop is None
        and not progress.paused
        and not deadline_reached(progress, now)
    )


def recent_rewards(rewards: tuple[float, ...], newest: float) -> tuple[float, ...]:
    """``rewards`` with ``newest`` at the end, bounded."""
    return (*rewards, newest)[-RECENT_REWARDS:]


def smoothed(previous: float, seconds: float) -> float:
    """Exponential mean of seconds per update; the first value stands for itself."""
    if previous <= 0:
        return seconds
    return (1 - _SMOOTHING) * previous + _SMOOTHING * seconds
