"""Current attempts of a run: the workflow, its pending activities, its actors; newest of each."""

import asyncio
from collections.abc import Iterable
from typing import Any

import psutil
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client
from temporalio.service import RPCError

from activities.storage import layout
from workers.cli import artifacts
from workers.cli.display import age
from workers.cli.overview import actors_of
from workers.cli.server import RPC_TIMEOUT
from workers.cli.status_ranks import rank_rows

WORKFLOW = "workflow"
_STATES = {
    PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED: "pending",
    PendingActivityState.PENDING_ACTIVITY_STATE_STARTED: "running",
    PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED: "canceling",
    PendingActivityState.PENDING_ACTIVITY_STATE_PAUSED: "paused",
    PendingActivityState.PENDING_ACTIVITY_STATE_PAUSE_REQUESTED: "pausing",
}


async def attempts_of(
    client: Client | None, run: dict[str, Any], *, is_local: bool
) -> list[dict[str, Any]]:
    """Newest attempt per (task, rank): workflow first, then activities, then processes.

    Args:
        client: whom to ask for pending activities; none: nobody.
        run: a run of the overview.
        is_local: every process of the run is on this host.
    """
    rows = [await asyncio.to_thread(_workflow, run)]
    if client is not None:
        rows += [_activity(each) for each in await _pending(client, run["run_id"])]
    rows += await asyncio.to_thread(_processes, run, is_local=is_local)
    return newest(rows)


def newest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row with the highest attempt of each (task, rank), in the order of first appearance."""
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        key = row["task"], row["rank"]
        if key not in latest or row["attempt"] >= latest[key]["attempt"]:
            latest[key] = row
    return list(latest.values())


def _workflow(run: dict[str, Any]) -> dict[str, Any]:
    starts = artifacts.read_json(run["root"], layout.ATTEMPTS_JSON) if run["root"] else None
    last = starts[-1] if isinstance(starts, list) and starts else {}
    owner = artifacts.read_json(run["root"], layout.OWNER_JSON) if run["root"] else None
    state = artifacts.read_json(run["root"], layout.WORKFLOW_JSON) if run["root"] else None
    claimer = owner.get("owner", {}) if isinstance(owner, dict) else {}
    error = state.get("error") if isinstance(state, dict) else None
    kind, _, message = str(error or "").partition(": ")
    return {
        "task": WORKFLOW,
        "rank": 0,
        "state": run["state"],
        "attempt": int(last.get("attempt", 0)),
        "host": claimer.get("host") or None,
        "pid": claimer.get("pid") or None,
        "age_s": age(last.get("started_unix")),
        "last_failure": kind or None,
        "reason": run["error"] or message or None,
    }


async def _pending(client: Client, run_id: str) -> list[PendingActivityInfo]:
    """Activities that wait or run; none where the server does not say."""
    try:
        described = await client.get_workflow_handle(run_id).describe(rpc_timeout=RPC_TIMEOUT)
    except RPCError:
        return []
    return list(described.raw_description.pending_activities)


def _activity(pending: PendingActivityInfo) -> dict[str, Any]:
    """The attempt's number counts from 0, as everywhere here; Temporal counts from 1."""
    failure = pending.last_failure if pending.HasField("last_failure") else None
    started = pending.last_started_time if pending.HasField("last_started_time") else None
    pid, at, host = pending.last_worker_identity.partition("@")
    kind = None
    if failure is not None:
        kind = failure.application_failure_info.type or failure.WhichOneof("failure_info")
    return {
        "task": pending.activity_type.name,
        "rank": 0,
        "state": _STATES.get(pending.state, "unknown"),
        "attempt": max(0, pending.attempt - 1),
        "host": (host if at else pid) or None,
        "pid": int(pid) if at and pid.isdecimal() else None,
        "age_s": age(started.seconds if started is not None else None),
        "last_failure": kind,
        "reason": failure.message if failure is not None else None,
    }


def _processes(run: dict[str, Any], *, is_local: bool) -> list[dict[str, Any]]:
    """A row a process of the fleet; a trainer has one for each of its ranks."""
    rows: list[dict[str, Any]] = []
    for row in _actors(run, actors_of(run["root"], is_local=is_local)):
        is_trainer = row["task"] == "trainer"
        rows += rank_rows(run["root"], row, is_local=is_local) if is_trainer else [row]
    return rows


def _actors(run: dict[str, Any], fleet: list[dict[str, Any]]) -> list[dict[str, Any]]:
    replaced = any(actor["incarnation"] for actor in fleet)
    failures = _engine_failures(run["root"]) if replaced else {}
    ended = run["state"] in ("complete", "failed", "stopped")
    rows = []
    for actor in fleet:
        name, alive = f"{actor['role']}-{actor['rank']}", bool(actor["alive"])
        failure, reason = failures.get(
            (name, actor["incarnation"] - 1),
            (actor["last_failure"] or None, actor["reason"] or None),
        )
        if actor["incarnation"] and reason is None:
            reason = _where_it_may_be_told(run["root"], actor)
        started = actor["started_unix"] or (_started_unix(actor["pid"]) if alive else None)
        rows.append(
            {
                "task": actor["role"],
                "rank": actor["rank"],
                "state": "running" if alive else "ended" if ended else "lost",
                "attempt": actor["incarnation"],
                "host": actor["host"],
                "pid": actor["pid"],
                "age_s": age(started) if alive else None,
                "last_failure": failure,
                "reason": reason,
            }
        )
    return rows


def _where_it_may_be_told(root: str, actor: dict[str, Any]) -> str:
    """For records of versions that kept no reason."""
    log = f"{root}/logs/engine-{actor['rank']}.log"
    where = log if actor["role"] == "engine" else "the log of its worker"
    return f"replaced between publications: see {where}"


def _engine_failures(root: str) -> dict[tuple[str, int], tuple[str, str]]:
    """(engine, life) -> phase of the publication in which that life failed, and its error."""
    return {
        (str(each["engine"]), int(each["incarnation"])): (str(each["phase"]), str(each["error"]))
        for row in artifacts.rows_of(root, layout.PUBLICATION)
        for each in row.get("replaced") or ()
    }


def _started_unix(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None  # on another host, or gone since
