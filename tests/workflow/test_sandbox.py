"""Workflow code may import only what the plugin lists; search attributes are registered once."""

import sys
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.operatorservice.v1 import RemoveSearchAttributesRequest
from temporalio.client import Client
from temporalio.worker import Worker

from activities.server import missing_search_attributes
from workers.connection import connect, ensure_search_attributes

pytestmark = pytest.mark.workflow

FORBIDDEN_WORKFLOW = """
from temporalio import workflow
import activities.storage.store

@workflow.defn
class Bad:
    @workflow.run
    async def run(self) -> None:
        return None
"""


async def test_a_worker_refuses_workflow_code_with_foreign_imports(
    temporal_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_workflow.py").write_text(FORBIDDEN_WORKFLOW)
    monkeypatch.syspath_prepend(tmp_path)
    import bad_workflow  # type: ignore[import-not-found]

    with pytest.raises(RuntimeError, match="Failed validating workflow Bad"):
        Worker(temporal_client, task_queue="bad", workflows=[bad_workflow.Bad])
    sys.modules.pop("bad_workflow")


async def test_search_attributes_are_registered_where_they_miss(temporal: Any) -> None:
    client = await connect(temporal.client.service_client.config.target_host)
    assert await missing_search_attributes(client) == []
    assert await ensure_search_attributes(client)


async def test_a_removed_search_attribute_is_registered_again(temporal: Any) -> None:
    client = await connect(temporal.client.service_client.config.target_host)
    await client.operator_service.remove_search_attributes(
        RemoveSearchAttributesRequest(namespace=client.namespace, search_attributes=["RecipeName"])
    )
    assert await missing_search_attributes(client) == ["RecipeName"]
    assert await ensure_search_attributes(client)
    assert await missing_search_attributes(client) == []
