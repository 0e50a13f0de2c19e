"""What Temporal knows of background evaluations, asked from within an activity."""

import asyncio
from datetime import timedelta
from typing import Protocol

from temporalio import activity
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.service import RPCError, RPCStatusCode

from models.errors import ServiceUnreachable

RPC_TIMEOUT = timedelta(seconds=10)
RESTART_S = 300.0
"""Between the stop of a run that is rewound and its start; all of them, if there are several."""
RESTART_POLL_S = 1.0


class Experiments(Protocol):
    """Evaluations as workflows."""

    async def is_open(self, experiment_id: str) -> bool | None:
        """Whether it runs; None for one that was never started, or is forgotten.

        Raises:
            ServiceUnreachable: the server did not answer.
        """
        ...

    async def closed(self, experiment_id: str) -> None:
        """Return when it does not run any more, however it ended.

        A run that was stopped to be started again (a rewind) is waited for ``RESTART_S`` seconds,
        and then to its end.
        """
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
        for _ in range(round(RESTART_S / RESTART_POLL_S)):
            if not await self._ends_to_restart(experiment_id):
                return
            await asyncio.sleep(RESTART_POLL_S)

    async def _ends_to_restart(self, experiment_id: str) -> bool:
        """Wait for the end of the newest execution; whether somebody is to start another one."""
        handle = activity.client().get_workflow_handle(experiment_id)
        try:
            outcome = await handle.result()
        except WorkflowFailureError:
            return False
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return False
            raise ServiceUnreachable(f"Temporal does not answer: {error.message}") from error
        return isinstance(outcome, dict) and bool(outcome.get("restarts"))
