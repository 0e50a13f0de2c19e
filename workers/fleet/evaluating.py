"""Evaluators: actors beside every fleet, bound to the process that asked for them."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from activities.multiplier import infra_timeout_multiplier
from activities.site import spec_of
from models.background import BackgroundOrder
from models.errors import EngineLost, PerdureError
from models.evaluation import EvaluationReport
from models.ports import StageProgress
from workers.actors.evaluator import GRACE_S, EvaluatorActor
from workers.actors.order import ActorFacts, ActorOrder, fleet_token, require_same_code
from workers.fleet.calls import RemoteActor
from workers.fleet.cluster import RayCluster
from workers.fleet.folders import scratch_folder
from workers.source_digest import source_digest

NUM_CPUS = 0
"""What an evaluator takes of the cluster's places: on a small machine the fleet holds them all."""

_CLOSE_TIMEOUT_S = GRACE_S + 5.0
_log = structlog.get_logger(__name__)


class RayEvaluators:
    """Opens evaluators on one cluster; ``open`` is a ``models.ports.OpenEvaluator``.

    Ray ends such an actor with the process that made it, and the actor's engine ends with the
    actor. So a killed worker leaves nothing behind, and a run's end or the reaper find nothing
    that belongs to the run.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    @asynccontextmanager
    async def open(self, job: BackgroundOrder) -> AsyncIterator["RemoteEvaluator"]:
        """An evaluator for ``job``; ended, with its engine and scratch folder, on leaving.

        Raises:
            EngineLost: its process could not be started.
            ConfigurationError: it runs other code than this process.
        """
        scratch = scratch_folder(f"{job.run.root}/{job.receipt}")
        order = ActorOrder(
            run=job.run,
            role="evaluator",
            scratch=str(scratch),
            timeout_factor=infra_timeout_multiplier(),
            engine_token=fleet_token(),
        )
        handle = await self._cluster.create_bound(
            EvaluatorActor, {"num_cpus": NUM_CPUS}, order, job
        )
        actor = RemoteActor(self._cluster, job.experiment_id, order.name, EngineLost)
        actor.adopt(handle)
        try:
            spec = await asyncio.to_thread(spec_of, job.run)
            start_s = spec.launch.startup_timeout_s * infra_timeout_multiplier()
            facts: ActorFacts = await actor.call("facts", timeout_s=start_s)
            require_same_code(facts, source_digest())
            yield RemoteEvaluator(actor)
        finally:
            with contextlib.suppress(PerdureError):
                await actor.call("close", timeout_s=_CLOSE_TIMEOUT_S)
            await self._cluster.kill(handle)
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
            _log.info("evaluator ended", experiment=job.experiment_id)


class RemoteEvaluator:
    """``models.ports.EvaluatorPort`` on an actor."""

    def __init__(self, actor: RemoteActor) -> None:
        self._actor = actor

    async def evaluate(self) -> EvaluationReport:
        """See ``EvaluatorPort``."""
        report: EvaluationReport = await self._actor.call("evaluate", timeout_s=None, cancel=True)
        return report

    async def progress(self) -> StageProgress:
        """See ``EvaluatorPort``."""
        progress: StageProgress = await self._actor.call("progress")
        return progress
