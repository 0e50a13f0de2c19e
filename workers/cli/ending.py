"""How a run ended, for people and for scripts."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from activities.analysis.costs import UpdateCosts
from activities.storage import layout
from models.evaluation import ExportReport
from models.run import RunOutcome, RunProgress, RunState
from workers.cli import artifacts, errors
from workers.cli.chart import columns
from workers.cli.display import duration, history_url
from workers.cli.names import as_options
from workers.cli.server import Failure, RunView


@dataclass(frozen=True, slots=True)
class Ending:
    """A closed run."""

    run_id: str
    state: str
    updates: int
    total: int
    seconds: float
    root: str
    history: artifacts.History
    outcome: RunOutcome | None
    failure: Failure | None
    export: ExportReport | None
    reward_first: float | None
    reward_last: float | None
    costs: UpdateCosts | None
    submissions: Sequence[dict[str, Any]] = ()
    """Summaries of the receipts of background evaluations, by update."""

    @property
    def exit_code(self) -> int:
        """0 only for a complete run: a stopped one is resumable and not done."""
        if self.state == RunState.COMPLETE:
            return errors.DONE
        return errors.exit_code_of(self.failure.kind if self.failure else None)

    def as_json(self) -> dict[str, Any]:
        """The last line of ``run --json``."""
        return {
            "run_id": self.run_id,
            "state": self.state,
            "updates": self.updates,
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "seconds": round(self.seconds, 3),
            "root": self.root,
            "export_hf": self.outcome.export_hf if self.outcome else None,
            "error": self.failure.message if self.failure else None,
        }


def read_ending(
    view: RunView,
    progress: RunProgress | None,
    outcome: RunOutcome | Failure,
    export: ExportReport | None,
    root: str,
) -> Ending:
    """Put together what the server and the output root say about a closed run."""
    failure = outcome if isinstance(outcome, Failure) else None
    done = outcome if isinstance(outcome, RunOutcome) else None
    progress = progress or RunProgress()
    # A run that was refused its root must not show what another run left there.
    owned = done is not None or progress.run is not None
    history = artifacts.read_history(root) if owned else artifacts.History()
    started = progress.started_unix or view.started_unix
    finished = progress.finished_unix or view.closed_unix or started
    first, last = history.reward_first, history.reward_last
    return Ending(
        run_id=view.run_id,
        state=done.state.value if done else _failed_state(view.status),
        updates=done.updates if done else progress.next_update,
        total=progress.plan.num_rollouts if progress.plan else 0,
        seconds=finished - started,
        root=root,
        history=history,
        outcome=done,
        failure=failure,
        export=export,
        reward_first=progress.reward_first if first is None else first,
        reward_last=progress.reward_last if last is None else last,
        costs=artifacts.read_costs(root) if owned else None,
        submissions=artifacts.read_submissions(root) if owned else (),
    )


def show_ending(console: Console, ending: Ending, again: Sequence[str], ui: str | None) -> None:
    """The last screen of a run: outcome, curve, evaluations, answer, paths, what to try next.

    ``again`` is what came after ``perdure run``; empty when nobody knows.
    """

    def line(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True)

    line()
    for text in (*_verdict(ending), *_curve(console, ending), *_answer(ending), *_paths(ending)):
        line(text)
    if ui:
        line(f"  history     {history_url(ui, ending.run_id)}")
    line()
    line(f"next: {_next_command(ending, again)}")


def _failed_state(status: str) -> str:
    """A canceled or terminated workflow left a run that can go on; everything else failed."""
    return RunState.STOPPED if status in ("canceled", "terminated") else RunState.FAILED


def _verdict(ending: Ending) -> list[str]:
    count = f"{ending.updates} of {ending.total}" if ending.total else str(ending.updates)
    head = f"{ending.run_id}: {ending.state}, {count} updates in {duration(ending.seconds)}"
    if ending.outcome is not None and ending.outcome.stopped_for_time:
        head += " (the soft deadline core.max_run_seconds was reached)"
    lines = [head]
    if ending.reward_first is not None and ending.reward_last is not None:
        lines.append(f"  reward      {ending.reward_first:.3f} -> {ending.reward_last:.3f}")
    evaluations = ending.history.evaluations
    if evaluations:
        ends = dict.fromkeys((evaluations[0], evaluations[-1]))
        text = " -> ".join(f"{reward:.3f} after update {update}" for update, reward in ends)
        lines.append(f"  evaluation  {text}")
    lines += _background(ending)
    if ending.costs is not None:
        lines.append(f"  update      {_costs(ending.costs)}")
    return lines


def _background(ending: Ending) -> list[str]:
    """The newest background evaluation, unless its result is among the evaluations already."""
    newest = ending.submissions[-1] if ending.submissions else None
    if newest is None or any(
        each["result"] == "complete"
        for each in ending.submissions
        if each["update"] == newest["update"]
    ):
        return []
    state = newest["result"] or newest["status"]
    return [
        f"  background  evaluation after update {newest['update']}: {state}; "
        f"perdure evaluation list {shlex.quote(ending.root)}"
    ]


def _costs(costs: UpdateCosts) -> str:
    text = (
        f"{costs.seconds_per_update:.2f} s: sampling {costs.rollout_seconds:.2f}, training "
        f"{costs.train_seconds:.2f}, publication {costs.publish_seconds:.2f}"
    )
    share = costs.control_plane_share
    return f"{text} (side by side)" if share is None else f"{text}, control plane {share:.1%}"


def _curve(console: Console, ending: Ending) -> list[str]:
    if len(ending.history.rewards) < 2:
        return []
    chart = columns(
        ending.history.rewards,
        max_width=max(10, min(72, console.width - 10)),
        ascii_only=not console.encoding.lower().startswith("utf"),
    )
    return ["", "  mean reward of each update", *(f"  {text}" for text in chart), ""]


def _answer(ending: Ending) -> list[str]:
    report = ending.export
    if report is None or not report.question:
        return []
    return [
        f"  asked       {' '.join(report.question.split())}",
        f"  the exported model answers: {report.answer.strip()!r}",
    ]


def _paths(ending: Ending) -> list[str]:
    lines = [f"  root        {ending.root}"]
    if not ending.updates:
        return lines
    if ending.outcome is not None and ending.outcome.export_hf:
        lines.append(f"  model       {_below(ending.root, ending.outcome.export_hf)}")
    if ending.outcome is not None and ending.outcome.checkpoint is not None:
        lines.append(f"  checkpoint  {_below(ending.root, ending.outcome.checkpoint.folder)}")
    lines.append(f"  metrics     {_below(ending.root, layout.METRICS)}")
    lines.append(f"  samples     {_below(ending.root, layout.ROLLOUTS)}")
    return lines


def _below(root: str, path: str) -> str:
    return path if path.startswith("/") or "://" in path else f"{root.rstrip('/')}/{path}"


def _next_command(ending: Ending, again: Sequence[str]) -> str:
    name = ending.run_id.removeprefix("train/")
    if not again:
        return shlex.join(["perdure", "status", name])
    if ending.state != RunState.COMPLETE:
        return shlex.join(["perdure", "run", *again])
    changes = [f'name="{name}-2"', f'output.root="{ending.root}-2"', "data.seed=18"]
    return shlex.join(["perdure", "run", *again, *as_options(changes)])
