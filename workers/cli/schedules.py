"""Schedules of retraining as a Temporal server knows them. Every call has a deadline."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar

from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionExecutionStartWorkflow,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleDescription,
    ScheduleHandle,
    ScheduleIntervalSpec,
    ScheduleListActionStartWorkflow,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleState,
    WorkflowFailureError,
)
from temporalio.service import RPCError, RPCStatusCode

from models.errors import ConfigurationError, PerdureError, RequestRefused, ServiceUnreachable
from models.retraining import RetrainingOutcome, RetrainingRequest
from workers.cli.schedule_times import Timing
from workflows.options import CONTROL_QUEUE
from workflows.retraining import WORKFLOW_TYPE

RPC_TIMEOUT = timedelta(seconds=5)
FIRED_TIMEOUT_S = 30.0
"""Longest wait for a triggered firing to show in its schedule."""
_POLL_S = 0.25

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """A schedule as the server describes it."""

    schedule_id: str
    paused: bool
    note: str
    next_times: list[str]
    """ISO 8601, UTC; none while nothing is due."""
    running: list[str] = field(default_factory=list)
    """Workflow ids."""
    recent: list[str] = field(default_factory=list)
    """Workflow ids of the newest firings, oldest first."""
    num_firings: int = 0
    num_skipped: int = 0
    num_missed: int = 0
    overlap: str = ""
    request: RetrainingRequest | None = None


async def create(
    client: Client, schedule_id: str, request: RetrainingRequest, timing: Timing
) -> None:
    """Create the schedule.

    Raises:
        RequestRefused: it exists already.
        ConfigurationError: the server refuses its times.
    """
    patterns, times = ", ".join(request.data), timing.times()
    schedule = Schedule(
        action=ScheduleActionStartWorkflow(
            WORKFLOW_TYPE,
            request,
            id=schedule_id,
            task_queue=CONTROL_QUEUE,
            static_summary=f"retraining on new files of {patterns}",
        ),
        spec=ScheduleSpec(
            intervals=[ScheduleIntervalSpec(every, offset) for every, offset in times.intervals],
            cron_expressions=times.crons,
            jitter=times.jitter or None,
            time_zone_name=timing.time_zone,
        ),
        policy=SchedulePolicy(
            overlap=ScheduleOverlapPolicy[timing.overlap.name], catchup_window=times.catch_up
        ),
        state=ScheduleState(note=timing.note or None, paused=timing.paused),
    )
    try:
        await _answered(
            schedule_id, client.create_schedule(schedule_id, schedule, rpc_timeout=RPC_TIMEOUT)
        )
    except ScheduleAlreadyRunningError:
        raise RequestRefused(
            f"{schedule_id} exists already; delete it first: perdure schedule delete {schedule_id}"
        ) from None


async def list_schedules(client: Client) -> AsyncIterator[ScheduleView]:
    """Every schedule that starts the workflow of a retraining, whoever made it."""
    found = await _answered("schedules", client.list_schedules(rpc_timeout=RPC_TIMEOUT))
    async for each in found:
        schedule, info = each.schedule, each.info
        if schedule is None or info is None:
            continue
        action = schedule.action
        if isinstance(action, ScheduleListActionStartWorkflow) and action.workflow == WORKFLOW_TYPE:
            yield ScheduleView(
                schedule_id=each.id,
                paused=schedule.state.paused,
                note=schedule.state.note or "",
                next_times=_times(info.next_action_times),
                recent=[_workflow_id(result.action) for result in info.recent_actions],
            )


async def describe(client: Client, schedule_id: str) -> ScheduleView:
    """What the server knows of one.

    Raises:
        RequestRefused: there is none of that name.
    """
    return await _view(client, await _described(client, schedule_id))


async def trigger(client: Client, schedule_id: str) -> None:
    """Fire now, under the schedule's own overlap policy."""
    handle = client.get_schedule_handle(schedule_id)
    await _answered(schedule_id, handle.trigger(rpc_timeout=RPC_TIMEOUT))


async def trigger_and_wait(client: Client, schedule_id: str) -> RetrainingOutcome:
    """Fire now and wait for the decision, however long it takes.

    Raises:
        RequestRefused: the overlap policy skipped it.
        ServiceUnreachable: it did not start in time.
        PerdureError: the firing failed.
    """
    before = await _described(client, schedule_id)
    await trigger(client, schedule_id)
    workflow_id = await _fired(client, schedule_id, before)
    handle = client.get_workflow_handle(workflow_id, result_type=RetrainingOutcome)
    try:
        outcome: RetrainingOutcome = await handle.result()
    except WorkflowFailureError as error:
        cause = error.cause
        raise PerdureError(f"{workflow_id}: {getattr(cause, 'message', cause)}") from error
    return outcome


async def pause(client: Client, schedule_id: str, note: str, *, paused: bool) -> None:
    """Pause or go on; ``note`` replaces the schedule's note."""
    handle: ScheduleHandle = client.get_schedule_handle(schedule_id)
    call = handle.pause if paused else handle.unpause
    await _answered(schedule_id, call(note=note, rpc_timeout=RPC_TIMEOUT))


async def delete(client: Client, schedule_id: str) -> None:
    """Delete the schedule; a firing that runs goes on, and all files stay."""
    handle = client.get_schedule_handle(schedule_id)
    await _answered(schedule_id, handle.delete(rpc_timeout=RPC_TIMEOUT))


async def _fired(client: Client, schedule_id: str, before: ScheduleDescription) -> str:
    """Workflow id of the firing that came after ``before``."""
    try:
        async with asyncio.timeout(FIRED_TIMEOUT_S):
            while True:
                info = (await _described(client, schedule_id)).info
                if info.num_actions > before.info.num_actions:
                    return _workflow_id(info.recent_actions[-1].action)
                if info.num_actions_skipped_overlap > before.info.num_actions_skipped_overlap:
                    running = ", ".join(map(_workflow_id, info.running_actions))
                    raise RequestRefused(f"{schedule_id} was not fired: {running} still runs")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise ServiceUnreachable(
            f"{schedule_id}: no firing appeared within {FIRED_TIMEOUT_S:.0f} s"
        ) from None


async def _described(client: Client, schedule_id: str) -> ScheduleDescription:
    handle = client.get_schedule_handle(schedule_id)
    return await _answered(schedule_id, handle.describe(rpc_timeout=RPC_TIMEOUT))


async def _view(client: Client, described: ScheduleDescription) -> ScheduleView:
    schedule, info = described.schedule, described.info
    return ScheduleView(
        schedule_id=described.id,
        paused=schedule.state.paused,
        note=schedule.state.note or "",
        next_times=_times(info.next_action_times),
        running=[_workflow_id(action) for action in info.running_actions],
        recent=[_workflow_id(result.action) for result in info.recent_actions],
        num_firings=info.num_actions,
        num_skipped=info.num_actions_skipped_overlap,
        num_missed=info.num_actions_missed_catchup_window,
        overlap=schedule.policy.overlap.name.lower().replace("_", "-"),
        request=await _request(client, schedule.action),
    )


async def _request(client: Client, action: Any) -> RetrainingRequest | None:
    """What the schedule starts its workflow with; None when that is no request."""
    if not isinstance(action, ScheduleActionStartWorkflow) or len(action.args) != 1:
        return None
    try:
        (request,) = await client.data_converter.decode(action.args, [RetrainingRequest])
    except (ValueError, RuntimeError):
        return None
    return request if isinstance(request, RetrainingRequest) else None


def _workflow_id(action: Any) -> str:
    return action.workflow_id if isinstance(action, ScheduleActionExecutionStartWorkflow) else ""


def _times(times: Any) -> list[str]:
    found: list[datetime] = list(times)
    return [each.isoformat().replace("+00:00", "Z") for each in found]


async def _answered(schedule_id: str, call: Awaitable[T]) -> T:
    """Await a call to the server; its refusals become errors of the tree."""
    try:
        return await call
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise RequestRefused(f"{schedule_id}: there is no such schedule") from error
        if error.status is RPCStatusCode.INVALID_ARGUMENT:
            raise ConfigurationError(f"{schedule_id}: {error.message}") from error
        raise ServiceUnreachable(f"Temporal does not answer: {error.message}") from error
