"""Pause, resume, checkpoint_now, stop, cancel: what they do and when they are refused."""

import asyncio
import json
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowUpdateFailedError

from activities.storage import layout
from models.errors import StorageFull
from models.run import RunState

pytestmark = pytest.mark.workflow


async def refused(handle: Any, name: str, *arguments: Any) -> str:
    """The reason of a refusal."""
    with pytest.raises(WorkflowUpdateFailedError) as error:
        await handle.execute_update(name, args=list(arguments))
    return str(error.value.cause)


async def wait_for_stage(stage: Any, name: str) -> Any:
    """Poll the query until the run awaits ``name``."""
    async with asyncio.timeout(20):
        while (progress := await stage.progress()).stage != name:
            await asyncio.sleep(0.02)
    return progress


async def test_pause_holds_the_next_update_and_resume_goes_on(stage: Any) -> None:
    gate = stage.fleet.script.hold("collect 0")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 0")
    assert "not paused" in await refused(handle, "resume")
    await handle.execute_update("pause")
    assert "paused already" in await refused(handle, "pause")
    gate.set()
    progress = await wait_for_stage(stage, "paused")
    assert progress.next_update == 1
    assert progress.paused
    assert "collect 1" not in stage.fleet.log
    await handle.execute_update("resume")
    assert (await handle.result()).updates == 3


async def test_checkpoint_now_is_served_once_even_while_paused(stage: Any) -> None:
    gate = stage.fleet.script.hold("collect 0")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 0")
    await handle.execute_update("pause")
    gate.set()
    await wait_for_stage(stage, "paused")
    await handle.execute_update("checkpoint_now")
    async with asyncio.timeout(20):
        while (progress := await stage.progress()).checkpoint is None:
            await asyncio.sleep(0.02)
    assert progress.checkpoint.update == 0
    assert progress.checkpoint_requests == 0
    assert "already in" in await refused(handle, "checkpoint_now")
    await handle.execute_update("resume")
    await handle.result()
    assert [call for call in stage.fleet.log if call.startswith("save")] == [
        "save 0", "save 1", "save 2",
    ]  # fmt: skip


async def test_checkpoint_now_is_refused_where_checkpoints_are_off(stage: Any) -> None:
    gate = stage.fleet.script.hold("collect 0")
    document = stage.document(training={"save_checkpoints": False, "save_interval": None})
    handle = await stage.start(document)
    await stage.fleet.script.reached("collect 0")
    assert "save_checkpoints" in await refused(handle, "checkpoint_now")
    gate.set()
    await handle.result()


async def test_stop_without_checkpoint_ends_at_the_boundary(stage: Any) -> None:
    gate = stage.fleet.script.hold("optimize 0")
    handle = await stage.start()
    await stage.fleet.script.reached("optimize 0")
    await handle.execute_update("stop", {"reason": "lunch", "checkpoint": False})
    assert "lunch" in await refused(handle, "stop", {})
    assert "lunch" in await refused(handle, "pause")
    gate.set()
    outcome = await handle.result()
    assert outcome.state is RunState.STOPPED
    assert outcome.updates == 1
    assert not any(call.startswith("save") for call in stage.fleet.log)


async def test_stop_while_preparing_never_trains(stage: Any) -> None:
    gate = stage.fleet.script.hold("prepare")
    handle = await stage.start()
    await stage.fleet.script.reached("prepare")
    await handle.execute_update("stop")
    gate.set()
    outcome = await handle.result()
    assert outcome.state is RunState.STOPPED
    assert outcome.completed_rollout_ids is None
    assert not any(call.startswith(("collect", "export_weights")) for call in stage.fleet.log)
    assert stage.fleet.torn_down


async def ended(handle: Any) -> WorkflowExecutionStatus:
    """Status once the run is closed."""
    async with asyncio.timeout(30):
        while True:
            described = await handle.describe()
            if described.status not in (
                WorkflowExecutionStatus.RUNNING,
                WorkflowExecutionStatus.CONTINUED_AS_NEW,
            ):
                assert described.status is not None
                return described.status
            await asyncio.sleep(0.02)


async def test_cancel_drains_the_optimizer_and_commits(stage: Any) -> None:
    gate = stage.fleet.script.hold("optimize 0")
    handle = await stage.start()
    await stage.fleet.script.reached("optimize 0")
    await stage.client.get_workflow_handle(handle.id).cancel()
    gate.set()
    assert await ended(stage.client.get_workflow_handle(handle.id)) is (
        WorkflowExecutionStatus.CANCELED
    )
    assert "optimize 0 cancelled" not in stage.fleet.log
    tail = stage.fleet.log[stage.fleet.log.index("optimize 0") :]
    assert tail == [
        "optimize 0", "export_weights 1", "load engine-0 1", "data_state 0", "save 0",
        "revoke 1", "teardown",
    ]  # fmt: skip
    state = json.loads((stage.root / "workflow.json").read_text())
    assert state["status"] == "stopped"
    assert state["update"] == 1


async def test_cancel_joins_the_collection_before_it_tears_down(stage: Any) -> None:
    stage.fleet.script.hold("collect 1")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 1")
    await stage.client.get_workflow_handle(handle.id).cancel()
    assert await ended(stage.client.get_workflow_handle(handle.id)) is (
        WorkflowExecutionStatus.CANCELED
    )
    tail = stage.fleet.log[stage.fleet.log.index("collect 1") :]
    assert tail == [
        "collect 1", "collect 1 cancelled", "data_state 0", "save 0", "revoke 1", "teardown",
    ]  # fmt: skip


async def test_cancel_of_a_paused_run_ends_it(stage: Any) -> None:
    gate = stage.fleet.script.hold("collect 0")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 0")
    await handle.execute_update("pause")
    gate.set()
    await wait_for_stage(stage, "paused")
    current = stage.client.get_workflow_handle(handle.id)
    await current.cancel()
    assert await ended(current) is WorkflowExecutionStatus.CANCELED
    assert stage.fleet.log[-4:] == ["data_state 0", "save 0", "revoke 1", "teardown"]


async def test_cancel_while_preparing_ends_without_a_checkpoint(stage: Any) -> None:
    stage.fleet.script.hold("prepare")
    handle = await stage.start()
    await stage.fleet.script.reached("prepare")
    current = stage.client.get_workflow_handle(handle.id)
    await current.cancel()
    assert await ended(current) is WorkflowExecutionStatus.CANCELED
    assert stage.fleet.log == ["prepare", "prepare cancelled", "revoke 1", "teardown"]


async def test_a_failing_checkpoint_does_not_stop_a_cancellation(stage: Any) -> None:
    gate = stage.fleet.script.hold("optimize 0")
    stage.fleet.script.fail("save 0", StorageFull("disk full"))
    handle = await stage.start()
    await stage.fleet.script.reached("optimize 0")
    current = stage.client.get_workflow_handle(handle.id)
    await current.cancel()
    gate.set()
    assert await ended(current) is WorkflowExecutionStatus.CANCELED
    state = json.loads((stage.root / layout.WORKFLOW_JSON).read_text())
    assert state["status"] == "stopped"
    assert state["error"] == "StorageFull: disk full"
    assert stage.fleet.log[-2:] == ["revoke 1", "teardown"]


async def test_updates_of_an_ended_run_are_refused(stage: Any) -> None:
    gate = asyncio.Event()
    teardown = stage.fleet.teardown
    stage.fleet.script.gates["revoke 1"] = gate

    async def slow(run: Any) -> None:
        await gate.wait()
        await teardown(run)

    stage.fleet.teardown = slow
    handle = await stage.start()
    await wait_for_stage(stage, "revoke")
    for name in ("pause", "resume", "checkpoint_now", "stop"):
        assert "ending" in await refused(handle, name)
    gate.set()
    assert (await handle.result()).state is RunState.COMPLETE
