"""``perdure status`` against the real workflow: its word beside ``workflow.json``, its attempts."""

import asyncio
import json
from typing import Any

import pytest

from activities.storage import layout
from workers.cli.app import run_command

pytestmark = pytest.mark.workflow


async def answer(
    stage: Any, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON document; activities of this process log to the same output."""
    address = stage.client.service_client.config.target_host
    words = ["status", stage.name, "--json", "--address", address, *arguments]
    code = await asyncio.wait_for(asyncio.to_thread(run_command, words), 30)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [each for each in lines if each.startswith('{"runs"')]
    document: dict[str, Any] = json.loads(line)
    return code, document


def check(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The check of that name."""
    (found,) = [each for each in document["verification"]["checks"] if each["name"] == name]
    return dict(found)


async def test_stale_workflow_json_is_told_and_refuses_completion(
    stage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    await stage.run()
    code, document = await answer(stage, capsys)
    assert code == 0
    assert document["runs"][0]["warnings"] == []
    state = stage.store.read_json(layout.WORKFLOW_JSON)
    stage.store.write_json(layout.WORKFLOW_JSON, state | {"status": "training"})
    code, document = await answer(stage, capsys, "--verify")
    assert code == 1
    warning = f"{stage.store.root}/{layout.WORKFLOW_JSON} says training, Temporal says complete"
    assert document["runs"][0]["warnings"] == [warning]
    assert [flaw["problem"] for flaw in check(document, "workflow")["flaws"]] == [warning]
    assert not check(document, "state")["holds"]
    assert check(document, "updates")["evidence"].startswith("3 of 3")


async def test_pending_activity_is_an_attempt_and_a_running_run_is_not_complete(
    stage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = stage.fleet.script.hold("collect 1")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 1")
    code, document = await answer(stage, capsys, "--verify")
    assert code == 1
    (run,) = document["runs"]
    attempts = {each["task"]: each for each in run["attempts"]}
    assert attempts["workflow"]["state"] == "training"
    collect = attempts["collect"]
    assert (collect["state"], collect["attempt"], collect["last_failure"]) == ("running", 0, None)
    assert collect["age_s"] < 30
    assert check(document, "workflow")["flaws"][0]["problem"] == "Temporal says training"
    gate.set()
    await asyncio.wait_for(handle.result(), 30)


async def test_failed_run_has_its_reason(stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stage.root.mkdir(parents=True)
    document = stage.document()
    document["model"]["source"] = 7
    await stage.failure(await stage.start(document))
    code, report = await answer(stage, capsys, "--verify")
    assert code == 1
    (run,) = report["runs"]
    assert run["state"] == "failed"
    assert "model.source" in run["attempts"][0]["reason"]
    assert "Temporal says failed" in check(report, "workflow")["flaws"][0]["problem"]


async def test_unknown_run_is_not_complete(stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = await answer(stage, capsys, "--verify")
    assert code == 1
    assert document["runs"] == []
    flaws = check(document, "workflow")["flaws"]
    assert [flaw["problem"] for flaw in flaws] == ["the server knows no such run"]
