"""What ``status`` reports: every run with its actors, every process of the embedded stack."""

import asyncio
import socket
from dataclasses import asdict
from typing import Any

import psutil
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from temporalio.client import Client

from activities.storage import layout
from models.ports import ActorStatus
from models.run import RunOutcome, RunProgress, RunState
from workers.cli import artifacts
from workers.cli.display import finished_updates
from workers.cli.pipeline import Pipeline, queue_text, read_pipeline, samples_freely
from workers.cli.place import Place
from workers.cli.server import (
    Failure,
    RunView,
    connect_to,
    list_runs,
    look,
    outcome_of,
    progress_of,
)
from workers.local_stack import StackStatus

_ACTORS: TypeAdapter[tuple[ActorStatus, ...]] = TypeAdapter(tuple[ActorStatus, ...])
_LOOPBACK = ("localhost", "127.0.0.1")


async def overview(
    place: Place | None, run_id: str | None, stack: StackStatus | None
) -> dict[str, Any]:
    """Runs (all, or one) and stack processes as plain JSON.

    Raises:
        ServiceUnreachable: the server of ``place`` did not answer.
    """
    report: dict[str, Any] = {"runs": [], "processes": _processes(stack)}
    if place is None:
        return report
    report["temporal_address"], report["temporal_ui"] = place.address, place.ui
    client = await connect_to(place)
    run_ids = [run_id] if run_id else [each async for each in list_runs(client)]
    runs = await asyncio.gather(*(_run(client, each, place) for each in run_ids))
    report["runs"] = [each for each in runs if each is not None]
    return report


def show_overview(console: Console, report: dict[str, Any]) -> None:
    """The report as tables."""
    if report["runs"]:
        runs = Table("run", "state", "update", "version", "stage", box=None)
        runs.add_column("root", overflow="fold")
        for each in report["runs"]:
            done = f"{each['update']}/{each['total']}" if each["total"] else str(each["update"])
            cells = (done, str(each["policy_version"]), each["stage"], each["root"])
            runs.add_row(each["run_id"], each["state"], *cells)
        console.print(runs)
        _show_pipelines(console, report["runs"])
    else:
        console.print("no runs", style="dim")
    rows = [(each["run_id"], actor) for each in report["runs"] for actor in each["actors"]]
    if rows:
        actors = Table("run", "actor", "pid", "host", "gpus", "incarnation", "alive", box=None)
        for name, actor in rows:
            actors.add_row(
                name,
                f"{actor['role']}-{actor['rank']}",
                str(actor["pid"]),
                actor["host"],
                ",".join(actor.get("gpus") or ("-",)),
                str(actor["incarnation"]),
                _yes(actor["alive"]),
            )
        console.print(actors)
    if report["processes"]:
        processes = Table("process", "pid", "alive", "restarts", box=None)
        for process in report["processes"]:
            alive, restarts = _yes(process["alive"]), str(process["restarts"])
            processes.add_row(process["name"], str(process["pid"]), alive, restarts)
        console.print(processes)
    if report.get("temporal_ui"):
        console.print(f"Temporal: {report['temporal_address']}, {report['temporal_ui']}")


def _show_pipelines(console: Console, runs: list[dict[str, Any]]) -> None:
    """One line a fully async run; nothing when there is none."""
    table = Table("run", "mode", "queue", "under way", "lag", box=None)
    for name in ("requeued", "too old", "trainer wait"):
        table.add_column(name)
    for each in runs:
        if each["pipeline"] is None:
            continue
        pipeline = Pipeline(**each["pipeline"])
        waited = pipeline.wait_seconds
        table.add_row(
            each["run_id"],
            pipeline.publication_mode or "?",
            queue_text(pipeline) or "?",
            _known(pipeline.running_groups),
            f"{each['lag']} of {_known(each['lag_limit'])}",
            _known(pipeline.requeued_groups),
            _known(pipeline.stale_groups),
            "?" if waited is None else f"{waited:.2f} s",
        )
    if table.row_count:
        console.print(table)


async def _run(client: Client, run_id: str, place: Place) -> dict[str, Any] | None:
    view = await look(client, run_id)
    if view is None:
        return None
    outcome = None if view.is_open else await outcome_of(client, run_id)
    # A closed run answers queries only while its fleet's worker lives; its outcome says enough.
    asks = view.is_open or "root" not in view.memo
    progress = await progress_of(client, run_id) if asks else None
    root = _root(view, progress)
    state = _state(view, progress, outcome)
    actors = await asyncio.to_thread(actors_of, root, is_local=place.stack is not None)
    known = progress or RunProgress()
    pipeline = None
    if view.is_open and samples_freely(known):
        since_unix = known.training_started_unix or 0.0
        pipeline = await asyncio.to_thread(read_pipeline, root, since_unix)
    done = outcome if isinstance(outcome, RunOutcome) else None
    checkpoint = done.checkpoint if done else known.checkpoint
    if done is not None:
        came_to = (done.updates, done.policy_version)
    elif progress is not None:
        came_to = (finished_updates(progress), progress.policy_version)
    else:
        came_to = await asyncio.to_thread(_written, root)
    return {
        "run_id": run_id,
        "state": state,
        "paused": known.paused,
        "update": came_to[0],
        "total": _total(view, known),
        "policy_version": came_to[1],
        "stage": _stage(view, progress, state),
        "reward": known.reward_last,
        "lag": known.lag,
        "lag_limit": known.plan.max_policy_lag if known.plan else None,
        "pipeline": asdict(pipeline) if pipeline else None,
        "recoveries": known.recoveries,
        "updates_redone": known.updates_redone,
        "epoch": known.epoch,
        "checkpoint": checkpoint.folder if checkpoint else None,
        "root": root,
        "error": outcome.message if isinstance(outcome, Failure) else known.error,
        "actors": [each for each in actors if view.is_open or each["alive"]],
    }


def _written(root: str) -> tuple[int, int]:
    """Updates and policy version of a run that nobody answers for, by its files."""
    if not root:
        return 0, 0
    state = artifacts.read_json(root, layout.WORKFLOW_JSON)
    updates = int(state.get("update", 0)) if isinstance(state, dict) else 0
    newest = artifacts.last_row(root, layout.UPDATES)
    return updates, int(newest.get("policy_version", 0))


def _root(view: RunView, progress: RunProgress | None) -> str:
    if progress is not None and progress.run is not None:
        return progress.run.root
    return str(view.memo.get("root", ""))


def _total(view: RunView, known: RunProgress) -> int:
    if known.plan is not None:
        return known.plan.num_rollouts
    return int(view.memo.get("num_rollouts", 0))


def _stage(view: RunView, progress: RunProgress | None, state: str) -> str:
    if not view.is_open:
        return state
    return "waiting for a worker" if progress is None else progress.stage


def _state(view: RunView, progress: RunProgress | None, outcome: object) -> str:
    if isinstance(outcome, RunOutcome):
        return outcome.state.value
    if not view.is_open:
        ended_early = view.status in ("canceled", "terminated")
        return (RunState.STOPPED if ended_early else RunState.FAILED).value
    return (progress.state if progress else RunState.PREPARING).value


def actors_of(root: str, *, is_local: bool) -> list[dict[str, Any]]:
    """What the fleet wrote at its last (re)build; pids of this host are looked at now."""
    if not root:
        return []
    written = artifacts.read_json(root, artifacts.FLEET_JSON)
    try:
        actors = _ACTORS.validate_python(
            written.get("actors", ()) if isinstance(written, dict) else written or ()
        )
    except ValidationError:
        return []
    rows = []
    for actor in actors:
        seen = seen_alive(actor.pid, actor.host, is_local=is_local)
        alive = actor.alive if seen is None else seen
        rows.append({**actor.model_dump(mode="json"), "alive": alive})
    return rows


def seen_alive(pid: int, host: str, *, is_local: bool) -> bool | None:
    """Whether a process lives; none when it is on another host. ``is_local``: all are on this."""
    is_here = is_local or host in (socket.gethostname(), *_LOOPBACK)
    return _is_alive(pid) if is_here else None


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _processes(stack: StackStatus | None) -> list[dict[str, Any]]:
    if stack is None:
        return []
    supervisor = {
        "name": "supervisor",
        "pid": stack.supervisor_pid,
        "restarts": 0,
        "alive": _is_alive(stack.supervisor_pid),
    }
    return [supervisor, *(each.model_dump(mode="json") for each in stack.processes)]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)
