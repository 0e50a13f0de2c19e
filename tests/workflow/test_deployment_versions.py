"""Workers of two versions on one server: a run moves to the version that is made current."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import RoutingConfigUpdateState
from temporalio.api.workflowservice.v1 import (
    DescribeWorkerDeploymentRequest,
    RegisterNamespaceRequest,
)
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities.catalog import ControlActivities, FleetActivities
from models.run import RunState
from tests.support.fake_fleet import site_of
from workers.connection import ensure_search_attributes
from workers.plugin import perdure_plugin
from workers.serving import build_worker
from workflows.options import CONTROL_QUEUE, fleet_queue

pytestmark = pytest.mark.workflow

NAMESPACE = "versioned"
DEPLOYMENT = "perdure"
TEMPORAL = Path(sys.executable).parent / "temporal"
EVERYWHERE = RoutingConfigUpdateState.ROUTING_CONFIG_UPDATE_STATE_COMPLETED
NOT_YET = ("not found", "no workers", "missing active task queues")
"""What the server answers while workers of a version do not poll every queue yet."""


@pytest.fixture
async def temporal_client(temporal: WorkflowEnvironment) -> Client:
    """A namespace of its own: the other tests' workers have no version."""
    address = temporal.client.service_client.config.target_host
    client = await Client.connect(address, namespace=NAMESPACE, plugins=[perdure_plugin()])
    request = RegisterNamespaceRequest(
        namespace=NAMESPACE, workflow_execution_retention_period=Duration(seconds=86400)
    )
    await client.workflow_service.register_namespace(request)
    async with asyncio.timeout(30):
        while not await ensure_search_attributes(client):
            await asyncio.sleep(0.1)
    return client


@pytest.fixture
async def control_worker(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    """The control worker of version 1; so are the workers that are made after it."""
    monkeypatch.setenv("PERDURE_DEPLOYMENT", DEPLOYMENT)
    monkeypatch.setenv("PERDURE_BUILD_ID", "1")
    async with build_worker(temporal_client, CONTROL_QUEUE, ControlActivities().all()):
        yield


async def make_current(client: Client, build_id: str) -> None:
    """As the deployment guide has it; a version is known once its workers poll.

    Returns when every queue of the server goes by it: until then a new run may go to the older one.
    """
    command = [TEMPORAL, "worker", "deployment", "set-current-version", "--yes"]
    version = ["--deployment-name", DEPLOYMENT, "--build-id", build_id]
    where = ["--address", client.service_client.config.target_host, "--namespace", NAMESPACE]
    async with asyncio.timeout(20):
        while True:
            done = await asyncio.to_thread(
                subprocess.run,
                [*command, *version, *where],
                capture_output=True,
                text=True,
                timeout=15,
            )
            if done.returncode == 0:
                break
            assert any(reason in done.stderr for reason in NOT_YET), done.stderr
            await asyncio.sleep(0.1)
        asked = DescribeWorkerDeploymentRequest(namespace=NAMESPACE, deployment_name=DEPLOYMENT)
        while True:
            found = await client.workflow_service.describe_worker_deployment(asked)
            if found.worker_deployment_info.routing_config_update_state == EVERYWHERE:
                return
            await asyncio.sleep(0.1)


async def versions(stage: Any) -> list[str]:
    """Build ids of the workers that took the run's workflow tasks, in order, each change once."""
    seen: list[str] = []
    for history in await stage.histories():
        for event in history.events:
            done = event.workflow_task_completed_event_attributes
            build_id = done.deployment_version.build_id or done.worker_deployment_version
            if build_id and seen[-1:] != [build_id]:
                seen.append(build_id)
    return seen


async def test_a_run_moves_to_the_current_version(
    make_stage: Callable[..., Any], temporal_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = await make_stage()
    await make_current(temporal_client, "1")
    gate = stage.fleet.script.hold("collect 1")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 1")

    monkeypatch.setenv("PERDURE_BUILD_ID", "2")
    site = site_of(stage.fleet, stage.tracker)
    activities = [*ControlActivities(site).all(), *FleetActivities(site).all()]
    async with AsyncExitStack() as workers:
        for queue in (CONTROL_QUEUE, fleet_queue(stage.name)):
            worker = build_worker(temporal_client, queue, activities)
            await workers.enter_async_context(worker)
        await make_current(temporal_client, "2")
        gate.set()
        async with asyncio.timeout(30):
            outcome = await handle.result()
    assert outcome.state is RunState.COMPLETE
    assert outcome.updates == 3
    assert await versions(stage) == ["1", "2"]
