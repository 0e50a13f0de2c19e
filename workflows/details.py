"""The run's current state as Markdown, for the Web UI and ``temporal workflow metadata``."""

from models.checkpoint import Rewind
from models.run import LoopPlan, RunProgress
from workflows import loop


def render(progress: RunProgress) -> str:
    """Current details of a run. Lists rather than tables: the Web UI draws those without lines."""
    total = progress.plan.num_rollouts if progress.plan else 0
    lines = [
        f"## {progress.state.value}: update {progress.next_update} of {total or '?'}",
        "",
        *([f"- what: {_what(progress)}"] if progress.plan else []),
        f"- now: {progress.stage}{' (paused)' if progress.paused else ''}",
        *([f"- mode: {_mode(progress.plan)}"] if progress.plan else []),
        f"- policy version: {progress.policy_version}, lag {progress.lag}",
        f"- reward: {_reward(progress)}",
        f"- last checkpoint: {_checkpoint(progress)}",
        f"- last evaluation: {_submission(progress) or _evaluation(progress)}",
        f"- epoch {progress.epoch}, recoveries {progress.recoveries}, "
        f"updates redone {progress.updates_redone}",
    ]
    if progress.rewind is not None:
        lines.append(f"- rewound: {_rewound(progress.rewind)}")
    if progress.run is not None:
        lines.append(f"- output: `{progress.run.root}`")
        if progress.plan is not None:
            tracking = progress.plan.tracking
            lines.append(f"- W&B: {f'`{tracking}`' if tracking else 'off'}")
        lines.append(f"- report: `{progress.run.root}/report.html`, made by `perdure report`")
    if progress.stop is not None:
        lines.append(f"- stop requested: {progress.stop.reason or 'no reason given'}")
    if progress.error is not None:
        lines.append(f"- error: {progress.error_type}: {progress.error}")
    return "\n".join(lines)


def _what(progress: RunProgress) -> str:
    """The static summary belongs to a workflow's first execution and is not carried over."""
    plan, run = progress.plan, progress.run
    text = f"`{plan.recipe_name}`, model `{plan.model_name}`" if plan else ""
    return f"{text}, run file sha256 `{run.spec_sha256[:16]}`" if run else text


def _mode(plan: LoopPlan) -> str:
    if plan.fully_async:
        return f"fully asynchronous, lag at most {plan.max_policy_lag}"
    return "one collection ahead" if loop.overlaps(plan) else "sequential"


def _reward(progress: RunProgress) -> str:
    recent = progress.reward_recent
    if not recent:
        return "none yet"
    half = len(recent) // 2
    if half == 0:
        return f"{recent[-1]:.3f}"
    older, newer = recent[:half], recent[half:]
    change = sum(newer) / len(newer) - sum(older) / len(older)
    return f"{recent[-1]:.3f}, trend {change:+.3f} over {len(recent)} updates"


def _checkpoint(progress: RunProgress) -> str:
    reference = progress.checkpoint
    if reference is None:
        return "none yet"
    return f"after update {reference.update + 1} (`{reference.folder}`)"


def _evaluation(progress: RunProgress) -> str:
    report = progress.evaluation
    if report is None:
        return "none yet"
    return f"{report.reward_mean:.3f} on {report.prompts} prompts after update {report.update}"


def _rewound(rewind: Rewind) -> str:
    text = f"to {rewind.updates} updates, {rewind.undone_updates} set aside"
    return f"{text} ({rewind.reason})" if rewind.reason else text


def _submission(progress: RunProgress) -> str:
    """State of the newest evaluation in background; empty when there is none."""
    submission = progress.submission
    if submission is None:
        return ""
    text = f"after update {submission.update}, in background: {submission.status.value}"
    if submission.error_type:
        return f"{text} ({submission.error_type}: {submission.error})"
    return f"{text} (`{submission.receipt}`)"
