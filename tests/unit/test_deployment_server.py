"""Jobs of the compose file against a real Temporal server; workers of two versions on it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities.server import missing_search_attributes
from workers.plugin import perdure_plugin

pytestmark = pytest.mark.workflow

ROOT = Path(__file__).parents[2]
TEMPORAL = Path(sys.executable).parent / "temporal"


def run_job(address: str, namespace: str) -> str:
    """The compose file's namespace job, as its container runs it."""
    done = subprocess.run(
        ["sh", ROOT / "deploy/temporal/namespace.sh"],
        env={
            "PATH": f"{TEMPORAL.parent}:{os.environ['PATH']}",
            "TEMPORAL_ADDRESS": address,
            "TEMPORAL_NAMESPACE": namespace,
            "PERDURE_RETENTION": "72h",
            "TEMPORAL_CONFIG_FILE": os.devnull,
        },
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_namespace_job_makes_what_workers_need(temporal: WorkflowEnvironment) -> None:
    address = temporal.client.service_client.config.target_host
    namespace = "made-by-the-job"
    await asyncio.to_thread(run_job, address, namespace)
    client = await Client.connect(address, namespace=namespace, plugins=[perdure_plugin()])
    assert await missing_search_attributes(client) == []
    await asyncio.to_thread(run_job, address, namespace)
    assert await missing_search_attributes(client) == []
    described = await asyncio.to_thread(
        subprocess.check_output,
        [TEMPORAL, "operator", "namespace", "describe", "-n", namespace, "--address", address],
        text=True,
        timeout=20,
    )
    assert "72h" in described
