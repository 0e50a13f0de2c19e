"""The activities of scheduled retraining as Temporal knows them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from temporalio import activity

from activities.background.experiments import Experiments, TemporalExperiments
from activities.failures import translated
from activities.heartbeat import beating
from activities.retraining.data import CheckRows
from activities.retraining.decide import decide
from activities.retraining.plan import plan_firing
from models.retraining import DecideRequest, Firing, FiringRequest, RetrainingOutcome


class RetrainingActivities:
    """What a control worker does for a firing: files only, the training is a run of its own.

    Args:
        check_rows: validates a data file as a run would.
        experiments: a seam for tests.
    """

    def __init__(self, check_rows: CheckRows, experiments: Experiments | None = None) -> None:
        self._check_rows = check_rows
        self._experiments = experiments or TemporalExperiments()

    @activity.defn
    async def plan_firing(self, request: FiringRequest) -> Firing:
        """See ``retraining.plan``."""
        with translated(activity.info().attempt):
            call = asyncio.to_thread(plan_firing, request, self._check_rows)
            return await beating(call, "plan the firing")

    @activity.defn
    async def await_training(self, run_id: str) -> None:
        """Return when the run that somebody else started has ended."""
        with translated(activity.info().attempt):
            await beating(self._experiments.closed(run_id), f"wait for {run_id}")

    @activity.defn
    async def decide_firing(self, request: DecideRequest) -> RetrainingOutcome:
        """See ``retraining.decide``."""
        with translated(activity.info().attempt):
            return await beating(asyncio.to_thread(decide, request), "decide")

    def all(self) -> Sequence[Callable[..., Any]]:
        """What a worker registers."""
        return [self.plan_firing, self.await_training, self.decide_firing]
