"""The activities as Temporal knows them: name, arguments, and errors in Temporal's form.

Each method adds what the plain functions need from Temporal (attempt, server) and nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any

from temporalio import activity

from activities import lifecycle
from activities.checkpoint import checkpoint
from activities.collect import collect
from activities.evaluate import evaluate
from activities.export import export
from activities.failures import translated
from activities.heartbeat import beating
from activities.optimize import optimize
from activities.prepare import prepare
from activities.publish import publish
from activities.server import server_facts
from activities.site import Site
from activities.tokens import Fenced, token_of
from models.checkpoint import CheckpointRef, CheckpointRequest
from models.evaluation import EvaluateRequest, EvaluationReport, ExportReport, ExportRequest
from models.ids import FenceToken
from models.publication import PublicationReport, PublishRequest
from models.rollout import CollectRequest, RolloutCollection
from models.run import (
    ClaimResult,
    PrepareReport,
    PrepareRequest,
    RecordRequest,
    RevokeRequest,
    RunRequest,
)
from models.update import OptimizeRequest, UpdateReport


class ControlActivities:
    """What any worker can do: the run's files. ``site`` is None where no fleet can be reached."""

    def __init__(self, site: Site | None = None) -> None:
        self._site = site

    @activity.defn
    async def claim(self, request: RunRequest) -> ClaimResult:
        """See ``lifecycle.claim``."""
        with translated(activity.info().attempt):
            return await beating(lifecycle.claim(request, await server_facts()), "claim")

    @activity.defn
    async def record(self, request: RecordRequest) -> None:
        """See ``lifecycle.record``."""
        with translated(activity.info().attempt):
            await beating(lifecycle.record(request), "record")

    @activity.defn
    async def revoke(self, request: RevokeRequest) -> None:
        """See ``lifecycle.revoke``."""
        with translated(activity.info().attempt):
            await beating(lifecycle.revoke(request, self._site), "revoke")

    def all(self) -> Sequence[Callable[..., Any]]:
        """What a worker registers."""
        return [self.claim, self.record, self.revoke]


class FleetActivities:
    """What needs the GPU plane."""

    def __init__(self, site: Site) -> None:
        self._site = site

    @activity.defn
    async def prepare(self, request: PrepareRequest) -> PrepareReport:
        """See ``activities.prepare``."""
        with translated(activity.info().attempt):
            return await prepare(self._site, request, _token(request))

    @activity.defn
    async def collect(self, request: CollectRequest) -> RolloutCollection:
        """See ``activities.collect``."""
        with translated(activity.info().attempt):
            return await collect(self._site, request, _token(request))

    @activity.defn
    async def optimize(self, request: OptimizeRequest) -> UpdateReport:
        """See ``activities.optimize``."""
        with translated(activity.info().attempt):
            return await optimize(self._site, request, _token(request))

    @activity.defn
    async def publish(self, request: PublishRequest) -> PublicationReport:
        """See ``activities.publish``."""
        with translated(activity.info().attempt):
            return await publish(self._site, request, _token(request))

    @activity.defn
    async def checkpoint(self, request: CheckpointRequest) -> CheckpointRef:
        """See ``activities.checkpoint``."""
        with translated(activity.info().attempt):
            return await checkpoint(self._site, request, _token(request))

    @activity.defn
    async def evaluate(self, request: EvaluateRequest) -> EvaluationReport:
        """See ``activities.evaluate``."""
        with translated(activity.info().attempt):
            return await evaluate(self._site, request, _token(request))

    @activity.defn
    async def export(self, request: ExportRequest) -> ExportReport:
        """See ``activities.export``."""
        with translated(activity.info().attempt):
            return await export(self._site, request, _token(request))

    def all(self) -> Sequence[Callable[..., Any]]:
        """What a worker registers."""
        return [
            self.prepare,
            self.collect,
            self.optimize,
            self.publish,
            self.checkpoint,
            self.evaluate,
            self.export,
        ]


def _token(request: Fenced) -> FenceToken:
    return token_of(request, activity.info().attempt)
