"""Runs of the real workflow and activities on the session's server, with the fleet faked."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowHistory
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer

from activities.background.catalog import BackgroundActivities
from activities.catalog import ControlActivities, FleetActivities
from activities.retraining.catalog import RetrainingActivities
from activities.storage import layout
from activities.storage.store import Store
from configs.load import resolve_document
from models.run import RunOutcome, RunProgress, RunRequest
from tests.support.fake_evaluator import FakeEvaluators
from tests.support.fake_fleet import FakeFleet, ListTracker, site_of
from tests.support.histories import write_history
from workers.plugin import perdure_plugin
from workers.serving import build_worker
from workers.sources.rows import jsonl_rows
from workflows.evaluation import BackgroundEvaluation
from workflows.options import CONTROL_QUEUE, fleet_queue
from workflows.retraining import Retraining
from workflows.training import Training


@dataclass
class Stage:
    """One run in a test: its fleet, its root, and how to start it."""

    client: Client
    root: Path
    name: str
    fleet: FakeFleet
    tracker: ListTracker = field(default_factory=ListTracker)
    handles: list[WorkflowHandle[Any, Any]] = field(default_factory=list)
    evaluators: FakeEvaluators = field(init=False)

    def __post_init__(self) -> None:
        self.evaluators = FakeEvaluators(self.fleet.script)

    @property
    def store(self) -> Store:
        return Store(self.root)

    def document(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """A run file of three updates; keyword arguments are merged into its tables."""
        document: dict[str, Any] = {
            "schema_version": 1,
            "name": self.name,
            "model": {"source": "tiny", "tiny": {}},
            "data": {
                "tasks": [{"task": "reverse_word", "train_count": 64, "eval_count": 8}],
            },
            "output": {"root": str(self.root)},
            "training": {
                "num_rollouts": 3,
                "rollout_batch_size": 2,
                "samples_per_prompt": 2,
                "save_interval": 2,
            },
            "evaluation": {"interval": 2},
            "launch": {"fleet": self.name, "heartbeat_timeout_s": 1.0},
        }
        for section, values in sections.items():
            document[section] = {**document.get(section, {}), **values}
        return resolve_document(document, origin="test").document

    async def start(self, document: dict[str, Any] | None = None) -> WorkflowHandle[Any, Any]:
        """Start the run as a user does."""
        request = RunRequest(config=self.document() if document is None else document)
        handle = await self.client.start_workflow(
            "Training",
            request,
            result_type=RunOutcome,
            id=f"train/{self.name}",
            task_queue=CONTROL_QUEUE,
        )
        self.handles.append(handle)
        return handle

    async def histories(self) -> list[WorkflowHistory]:
        """Every history of every start, along continue-as-new, and of what they had evaluated."""
        evaluations = sorted({order.experiment_id for order in self.evaluators.orders})
        found = [
            await self.client.get_workflow_handle(each).fetch_history() for each in evaluations
        ]
        for handle in self.handles:
            run_id = handle.first_execution_run_id
            while run_id:
                each = self.client.get_workflow_handle(handle.id, run_id=run_id)
                history = await each.fetch_history()
                found.append(history)
                ended = history.events[-1].workflow_execution_continued_as_new_event_attributes
                run_id = ended.new_execution_run_id
        return found

    async def run(self, document: dict[str, Any] | None = None) -> RunOutcome:
        """Start the run and wait for its outcome."""
        handle = await self.start(document)
        outcome: RunOutcome = await handle.result()
        return outcome

    async def failure(self, handle: WorkflowHandle[Any, Any]) -> ApplicationError:
        """The application error that the run ended with; anything else fails the test."""
        async with asyncio.timeout(30):
            with pytest.raises(WorkflowFailureError) as error:
                await handle.result()
        cause = error.value.cause
        assert isinstance(cause, ApplicationError), repr(cause)
        return cause

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The rows of one kind in ``metrics.jsonl``."""
        return [row for row in self.store.read_jsonl(layout.METRICS).rows if row["kind"] == kind]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait, with a deadline, until the fleet is as wished."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_logged(self, call: str) -> None:
        """Wait until the fleet has logged a call that starts so."""
        await self.until(lambda: any(entry.startswith(call) for entry in self.fleet.log))

    async def progress(self) -> RunProgress:
        handle = self.client.get_workflow_handle(f"train/{self.name}")
        answer: RunProgress = await handle.query("progress", result_type=RunProgress)
        return answer


@pytest.fixture(scope="session")
async def control_worker(temporal_client_session: Client) -> AsyncIterator[None]:
    """One control worker for all tests."""
    activities = [*ControlActivities().all(), *RetrainingActivities(jsonl_rows).all()]
    async with build_worker(temporal_client_session, CONTROL_QUEUE, activities):
        yield


@pytest.fixture(scope="session")
def temporal_client_session(temporal: Any) -> Client:
    client: Client = temporal.client
    return client


RECORD_VARIABLE = "PERDURE_RECORD_HISTORIES"
"""A folder: every history of every test is written there, for new replay fixtures."""


async def check_replay(stage: Stage, test: str) -> None:
    """Replay what the test ran: the workflow must be a function of its history."""
    workflows = [Training, BackgroundEvaluation, Retraining]
    replayer = Replayer(workflows=workflows, plugins=[perdure_plugin()])
    for index, history in enumerate(await stage.histories()):
        await replayer.replay_workflow(history)
        if folder := os.environ.get(RECORD_VARIABLE):
            target = Path(folder, f"{test}-{index}.json")
            await asyncio.to_thread(write_history, history, target, stage.root)


@pytest.fixture
async def make_stage(
    temporal_client: Client,
    control_worker: None,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Callable[..., Any]]:
    """Makes a run with a fleet of its own and a worker on that fleet's queue."""
    stages: list[Stage] = []
    async with AsyncExitStack() as workers:

        async def make(
            num_engines: int = 1,
            *,
            with_router: bool = False,
            fleet_class: type[FakeFleet] = FakeFleet,
        ) -> Stage:
            name = f"t{uuid.uuid4().hex[:10]}"
            fleet = fleet_class(num_engines, with_router=with_router)
            stage = Stage(temporal_client, tmp_path / name, name, fleet)
            site = site_of(stage.fleet, stage.tracker)
            background = BackgroundActivities(site, stage.evaluators.open, "tests")
            activities = [
                *ControlActivities(site).all(),
                *FleetActivities(site).all(),
                *background.all(),
            ]
            await workers.enter_async_context(
                build_worker(temporal_client, fleet_queue(name), activities)
            )
            stages.append(stage)
            return stage

        yield make
    for each in stages:
        await check_replay(each, request.node.originalname)


@pytest.fixture
async def stage(make_stage: Callable[..., Any]) -> Stage:
    """A run with one engine."""
    made: Stage = await make_stage()
    return made
