"""What Temporal knows of background evaluations, asked from within an activity."""

from datetime import timedelta
from typing import Protocol

from temporalio import activity
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.service import RPCError, RPCStatusCode

from models.errors import ServiceUnreachable

RPC_TIMEOUT = timedelta(seconds=10)


class Experiments(Protocol):
    """Evaluations as workflows."""

    async def is_open(self, experiment_id: str) -> bool | None:
        """Whether it runs; None for one that was never started, or is forgotten.

        Raises:
            ServiceUnreachable: the server did not answer.
        """
        ...

    async def closed(self, experiment_id: str) -> None:
        """Return when it does not run any more, however it ended."""
        ...


class TemporalExperiments:
    """``Experiments`` of the server that runs the current activity."""

    async def is_open(self, experiment_id: str) -> bool | None:
        """See ``Experiments``."""
        handle = activity.client().get_workflow_handle(experiment_id)
        try:
            described = await handle.describe(rpc_timeout=RPC_TIMEOUT)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise ServiceUnreachable(f"Temporal does not answer: {error.message}") from error
        return described.status is WorkflowExecutionStatus.RUNNING

    async def closed(self, experiment_id: str) -> None:
        """See ``Experiments``."""
        handle = activity.client().get_workflow_handle(experiment_id)
        try:
            await handle.result()
        except WorkflowFailureError:
            return
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise ServiceUnreachable(f"Temporal does not answer: {error.message}") from error
