"""What a person sees while a run goes on: a live panel, or plain lines where there is no terminal.

Both are told the newest ``RunProgress`` and know nothing of where it came from.
"""

import re
import time
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import quote

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from models.run import RunProgress, RunState
from workers.cli.chart import sparkline
from workers.cli.pipeline import (
    Pipeline,
    is_fully_async,
    queue_detail,
    queue_text,
    wait_detail,
)

_STATE_STYLE = {
    RunState.PREPARING: "yellow",
    RunState.TRAINING: "cyan",
    RunState.COMPLETE: "green",
    RunState.FAILED: "red",
    RunState.STOPPED: "magenta",
}


class Reporter(Protocol):
    """Shows progress. Entered once, told often."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(
        self, progress: RunProgress | None, note: str = "", pipeline: Pipeline | None = None
    ) -> None:
        """Take the newest progress; none while nobody can tell.

        ``note`` says what is amiss, ``pipeline`` what a fully async run has under way.
        """
        ...


class LiveReporter:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console, run_id: str, ui: str | None) -> None:
        self._run_id = run_id
        self._ui = ui
        self._started = time.time()
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(
        self, progress: RunProgress | None, note: str = "", pipeline: Pipeline | None = None
    ) -> None:
        """Redraw."""
        now = time.time()
        if progress is not None and progress.started_unix:
            self._started = progress.started_unix
        elapsed_s = now - self._started
        self._live.update(panel(self._run_id, progress, note, elapsed_s, self._ui, pipeline))


class PlainReporter:
    """One line an update, one a change of stage before the first update."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._updates = -1
        self._said = ""
        self._noted = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def show(
        self, progress: RunProgress | None, note: str = "", pipeline: Pipeline | None = None
    ) -> None:
        """Write what is new."""
        # A note counts seconds; it is said again only when it says something else.
        plain = re.sub(r"\d+", "", note)
        if note and plain != self._noted:
            self._line(note)
        self._noted = plain
        if progress is None:
            return
        if self._updates < 0 or progress.state is RunState.PREPARING:
            self._updates = progress.next_update  # finished before this was watched
        for update in range(self._updates, progress.next_update):
            self._line(update_line(progress, update, pipeline))
        self._updates = max(self._updates, progress.next_update)
        if _is_worth_a_line(progress):
            self._once(f"{progress.state.value}: {progress.stage}")

    def _once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def update_line(progress: RunProgress, update: int, pipeline: Pipeline | None = None) -> str:
    """One finished update as a line; only the newest one knows speed, lag and queue."""
    total = progress.plan.num_rollouts if progress.plan else 0
    behind = progress.next_update - update
    recent = progress.reward_recent
    reward = f"{recent[-behind]:.3f}" if behind <= len(recent) else "?"
    line = f"update {update + 1}/{total} reward {reward}"
    if behind == 1:
        line += (
            f" lag {progress.lag} {progress.tokens_per_second:,.0f} tokens/s"
            f" {progress.seconds_per_update:.2f} s/update"
        )
        queue = queue_text(pipeline) if pipeline else ""
        line += f" queue {queue}" if queue else ""
    return line


def panel(
    run_id: str,
    progress: RunProgress | None,
    note: str,
    elapsed_s: float,
    ui: str | None,
    pipeline: Pipeline | None = None,
) -> RenderableType:
    """The whole live display."""
    if progress is None:
        lines: list[RenderableType] = [Text.assemble((run_id, "bold"), "  ", "waiting")]
    else:
        lines = [_head(run_id, progress, elapsed_s), *_body(progress, pipeline)]
    # At the end the error itself is the last thing that is printed, below.
    if progress is not None and progress.error is not None and not _is_at_its_end(progress):
        lines.append(Text(error_line(progress), style="red"))
    if ui:
        lines.append(Text(history_url(ui, run_id), style="dim"))
    if note:
        lines.append(Text(note, style="yellow"))
    return Group(*lines)


def history_url(ui: str, run_id: str) -> str:
    """The run's page in Temporal's Web UI."""
    return f"{ui}/namespaces/default/workflows/{quote(run_id, safe='')}"


def error_line(progress: RunProgress) -> str:
    """What a run is ending of, while it still cleans up."""
    return f"{progress.state.value} ({progress.stage}): {progress.error_type}: {progress.error}"


def _is_at_its_end(progress: RunProgress) -> bool:
    return progress.stage == progress.state.value


def eta_s(progress: RunProgress) -> float | None:
    """Seconds to the last update at the current speed; none before the speed is known."""
    if progress.plan is None or progress.seconds_per_update <= 0:
        return None
    return (progress.plan.num_rollouts - progress.next_update) * progress.seconds_per_update


def finished_updates(progress: RunProgress) -> int:
    """Updates done; for a run that is being resumed, those in its checkpoint."""
    if progress.state is RunState.PREPARING and progress.checkpoint is not None:
        return progress.checkpoint.update + 1
    return progress.next_update


def duration(seconds: float) -> str:
    """``75`` as ``1:15``, ``4000`` as ``1:06:40``."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def age(started_unix: float | None) -> float | None:
    """Seconds since then; none when nobody knows when it was."""
    return None if started_unix is None else round(max(0.0, time.time() - started_unix), 1)


def _is_worth_a_line(progress: RunProgress) -> bool:
    """Stages of an update come and go too fast; those around the updates last."""
    if _is_at_its_end(progress):
        return False
    return progress.state is not RunState.TRAINING or progress.stage.split(" ")[0] in (
        "evaluate",
        "export",
        "checkpoint",
        "prepare",
    )


def _head(run_id: str, progress: RunProgress, elapsed_s: float) -> Text:
    paused = progress.paused and not progress.state.is_terminal
    state = "paused" if paused else progress.state.value
    text = Text.assemble((run_id, "bold"), "  ", (state, _STATE_STYLE[progress.state]))
    if progress.stage != state:
        text.append(f"  {progress.stage}")
    text.append(f"  {duration(elapsed_s)} elapsed", style="dim")
    remaining = eta_s(progress)
    if remaining is not None and not progress.state.is_terminal:
        text.append(f", about {duration(remaining)} to go", style="dim")
    return text


def _body(progress: RunProgress, pipeline: Pipeline | None) -> list[RenderableType]:
    """The bar, once the horizon is known, and the facts that there are."""
    if progress.plan is None:
        return []
    bar = Table.grid(padding=(0, 1))
    total, done = progress.plan.num_rollouts, finished_updates(progress)
    bar.add_row(ProgressBar(total=total, completed=done, width=40), f"update {done} of {total}")
    facts = _facts(progress, pipeline)
    return [bar, facts] if facts.row_count else [bar]


def _facts(progress: RunProgress, pipeline: Pipeline | None) -> Table:
    grid = Table.grid(padding=(0, 2))
    recent = progress.reward_recent
    if recent:
        first = progress.reward_first if progress.reward_first is not None else recent[0]
        grid.add_row("reward", f"{recent[-1]:.3f}", f"{sparkline(recent)}  from {first:.3f}")
    if progress.next_update:
        grid.add_row(
            "speed",
            f"{progress.seconds_per_update:.2f} s/update",
            f"{progress.tokens_per_second:,.0f} tokens/s, lag {_lag(progress)}",
        )
    if pipeline is not None and not progress.state.is_terminal:
        _add_pipeline(grid, pipeline)
    if progress.evaluation is not None:
        report = progress.evaluation
        where = f"{report.prompts} held-out prompts after update {report.update}"
        grid.add_row("evaluation", f"{report.reward_mean:.3f}", where)
    if progress.checkpoint is not None:
        at = progress.checkpoint.update + 1
        grid.add_row("checkpoint", f"update {at}", progress.checkpoint.folder)
    if progress.recoveries:
        redone = f"{progress.updates_redone} updates redone"
        grid.add_row("recoveries", str(progress.recoveries), redone)
    return grid


def _lag(progress: RunProgress) -> str:
    """The lag of the last update, with its limit where the producer runs ahead by itself."""
    if progress.plan is None or not is_fully_async(progress):
        return str(progress.lag)
    return f"{progress.lag} of at most {progress.plan.max_policy_lag}"


def _add_pipeline(grid: Table, pipeline: Pipeline) -> None:
    queue = queue_text(pipeline)
    if queue:
        grid.add_row("queue", queue, queue_detail(pipeline, time.time()))
    if pipeline.wait_seconds is not None:
        grid.add_row("wait", f"{pipeline.wait_seconds:.2f} s", wait_detail(pipeline))
