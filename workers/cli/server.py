"""Runs as a Temporal server knows them. Every call has a deadline."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError, CancelledError, TerminatedError
from temporalio.exceptions import TimeoutError as TemporalTimeoutError
from temporalio.service import RPCError, RPCStatusCode

from configs.load import Loaded
from configs.render import WORKFLOW_TYPE, run_request
from models.checkpoint import RewindRequest
from models.errors import ConfigurationError, RequestRefused, ServiceUnreachable
from models.run import RunOutcome, RunProgress, RunRequest, StopRequest
from workers.cli.place import Place
from workers.connection import connect
from workflows.options import CONTROL_QUEUE

RPC_TIMEOUT = timedelta(seconds=5)
QUERY_TIMEOUT = timedelta(seconds=4)
UPDATE_TIMEOUT_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """How a run ended when it returned no outcome."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as the server describes it."""

    run_id: str
    status: str
    """Temporal's word in lower case: running, completed, failed, canceled, terminated ..."""
    started_unix: float
    closed_unix: float | None
    memo: dict[str, Any]
    task_queue: str = CONTROL_QUEUE
    """Whose workers the run waits for."""

    @property
    def is_open(self) -> bool:
        """Whether it still runs; one that continues as new does."""
        return self.status in ("running", "continued_as_new")


async def connect_to(place: Place) -> Client:
    """A client whose server answered; ``ServiceUnreachable`` within seconds otherwise."""
    return await connect(place.address, configured=place.stack is None, works=False)


async def look(client: Client, run_id: str) -> RunView | None:
    """What the server knows of the newest execution of ``run_id``; none if nothing.

    Raises:
        ServiceUnreachable: the server did not answer in time.
    """
    handle = client.get_workflow_handle(run_id)
    try:
        return await _view(await _answered(handle.describe(rpc_timeout=RPC_TIMEOUT)))
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return None
        raise


async def list_runs(client: Client, limit: int = 100) -> AsyncIterator[str]:
    """Ids of all runs that the server keeps, newest first."""
    query = f'WorkflowType = "{WORKFLOW_TYPE}"'
    seen: set[str] = set()
    async for execution in client.list_workflows(query, limit=limit, rpc_timeout=RPC_TIMEOUT):
        if execution.id not in seen:
            seen.add(execution.id)
            yield execution.id


async def progress_of(client: Client, run_id: str) -> RunProgress | None:
    """The answer of the query ``progress``; none while no worker can answer it.

    Raises:
        ServiceUnreachable: the server itself did not answer.
    """
    handle = client.get_workflow_handle(run_id)
    try:
        answer: RunProgress = await handle.query(
            "progress", result_type=RunProgress, rpc_timeout=QUERY_TIMEOUT
        )
    except (WorkflowQueryFailedError, WorkflowQueryRejectedError):
        return None
    except RPCError as error:
        if error.status == RPCStatusCode.UNAVAILABLE:
            raise ServiceUnreachable(f"Temporal does not answer: {error.message}") from error
        return None
    return answer


async def outcome_of(client: Client, run_id: str) -> RunOutcome | Failure:
    """How a closed run ended."""
    handle = client.get_workflow_handle(run_id, result_type=RunOutcome)
    try:
        outcome: RunOutcome = await _answered(handle.result(rpc_timeout=RPC_TIMEOUT))
    except WorkflowFailureError as error:
        return _failure(error)
    return outcome


async def start_run(
    client: Client, loaded: Loaded, *, take_over: bool, rewind: RewindRequest | None = None
) -> str:
    """Start the workflow; returns Temporal's id of this execution.

    Raises:
        WorkflowAlreadyStartedError: it runs already.
        ServiceUnreachable: the server did not answer in time.
    """
    spec = loaded.spec
    request = RunRequest(**run_request(loaded, rewind), take_over=take_over)
    limit_s = spec.launch.timeout_s
    handle = await _answered(
        client.start_workflow(
            WORKFLOW_TYPE,
            request,
            id=spec.run_id,
            task_queue=CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            memo={
                "identity_sha256": loaded.identity,
                "root": spec.output.root,
                "num_rollouts": spec.training.num_rollouts,
            },
            static_summary=f"{spec.name}: {spec.model.source}",
            static_details=_details(loaded),
            execution_timeout=timedelta(seconds=limit_s) if limit_s else None,
            rpc_timeout=RPC_TIMEOUT,
        )
    )
    return handle.first_execution_run_id or ""


async def request_update(
    client: Client, run_id: str, name: str, argument: StopRequest | None = None
) -> RunProgress:
    """Ask a running workflow for something, wait until it accepted and did it, return its progress.

    Raises:
        RequestRefused: its validator said no, or it does not run any more.
        ServiceUnreachable: no worker answered within 30 s.
    """
    handle = client.get_workflow_handle(run_id)
    arguments = [] if argument is None else [argument]
    asked = handle.execute_update(name, args=arguments, result_type=RunProgress)
    try:
        progress: RunProgress = await asyncio.wait_for(asked, UPDATE_TIMEOUT_S)
    except WorkflowUpdateFailedError as error:
        cause = error.cause
        raise RequestRefused(f"{run_id}: {getattr(cause, 'message', cause)}") from error
    except (TimeoutError, WorkflowUpdateRPCTimeoutOrCancelledError) as error:
        raise ServiceUnreachable(
            f"{run_id}: no control worker answered within {UPDATE_TIMEOUT_S:.0f} s"
        ) from error
    except RPCError as error:
        raise _refused_or_unreachable(run_id, error) from error
    return progress


async def request_cancel(client: Client, run_id: str) -> None:
    """Ask Temporal to cancel the run.

    Raises:
        RequestRefused: it does not run.
        ServiceUnreachable: the server did not answer.
    """
    handle = client.get_workflow_handle(run_id)
    try:
        await handle.cancel(rpc_timeout=RPC_TIMEOUT)
    except RPCError as error:
        raise _refused_or_unreachable(run_id, error) from error


async def _answered(call: Awaitable[T]) -> T:
    """Await a call to the server; an unanswered one is ``ServiceUnreachable``."""
    try:
        return await call
    except RPCError as error:
        if error.status in (RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED):
            raise ServiceUnreachable(f"Temporal does not answer: {error.message}") from error
        if error.status == RPCStatusCode.NOT_FOUND and "namespace" in error.message.lower():
            raise ConfigurationError(f"Temporal refuses: {error.message}") from error
        raise


async def _view(description: WorkflowExecutionDescription) -> RunView:
    status = description.status or WorkflowExecutionStatus.RUNNING
    return RunView(
        run_id=description.id,
        status=status.name.lower(),
        started_unix=description.start_time.timestamp(),
        closed_unix=description.close_time.timestamp() if description.close_time else None,
        memo=dict(await description.memo()),
        task_queue=description.task_queue,
    )


def _failure(error: WorkflowFailureError) -> Failure:
    """The workflow's own error; what caused it in turn is in its history."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        return Failure(cause.type or "ApplicationError", cause.message)
    if isinstance(cause, TemporalTimeoutError):
        return Failure(
            "RunTimeout",
            "launch.timeout_s has passed; the same command resumes from the newest checkpoint",
        )
    if isinstance(cause, (CancelledError, TerminatedError)):
        return Failure(type(cause).__name__, str(cause) or "ended from outside")
    return Failure(type(cause).__name__, str(cause))


def _refused_or_unreachable(run_id: str, error: RPCError) -> Exception:
    if error.status == RPCStatusCode.NOT_FOUND:
        return RequestRefused(f"{run_id}: does not run ({error.message})")
    return ServiceUnreachable(f"Temporal does not answer: {error.message}")


def _details(loaded: Loaded) -> str:
    spec = loaded.spec
    return (
        f"**{spec.name}**, {spec.training.num_rollouts} updates of "
        f"{spec.training.rollout_batch_size} x {spec.training.samples_per_prompt} samples\n\n"
        f"- model `{spec.model.source}`\n- root `{spec.output.root}`\n"
        f"- run file `{loaded.path}`, sha256 `{loaded.sha256[:16]}`"
    )
