"""Runs that must end FAILED with a message, and go on once what was wrong is put right."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from activities.storage import layout
from models.errors import ConfigurationError, StorageFull
from models.run import RunRequest, RunState
from workflows.options import CONTROL_QUEUE
from workflows.request import parse_request

pytestmark = pytest.mark.workflow


async def failure_of(stage: Any, *inputs: Any) -> Any:
    """How a run ends that is started with ``inputs``, as ``temporal workflow start`` does."""
    handle = await stage.client.start_workflow(
        "Training", args=inputs, id=f"train/{stage.name}", task_queue=CONTROL_QUEUE
    )
    return await stage.failure(handle)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((), "no 'config'; make one with: perdure config render"),
        ((None,), "must be a JSON object, not NoneType"),
        (("hello",), "must be a JSON object, not str"),
        ((b"\x00\xff",), "must be a JSON object, not bytes"),
        (([1, 2],), "must be a JSON object, not list"),
        (({}, {}), "takes one input, not 2"),
        (({"config": "x"},), 'config = "x": must be a table, not text'),
        (({"config": {}, "take_over": "perhaps"},), "take_over"),
        (({"config": {"nmae": "x"}},), "config: nmae = "),
    ],
)
async def test_an_input_that_is_no_request_ends_the_run(
    stage: Any, inputs: tuple[Any, ...], text: str
) -> None:
    failure = await failure_of(stage, *inputs)
    assert failure.type == "ConfigurationError"
    assert text in failure.message
    assert not stage.root.exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"training": {"num_rollouts": "two"}}, 'training.num_rollouts = "two": must be an'),
        ({"training": {"num_rolouts": 2}}, "did you mean 'num_rollouts'?"),
        ({"optimizer": {"learning_rate": -1.0}}, "optimizer.learning_rate"),
        ({"output": {"root": "runs/x"}}, "must be an absolute path or a URL here"),
        ({"data": {"tasks": []}}, "needs exactly one of tasks and prompt_data"),
        ({"output": {"root": "/proc/perdure"}}, "cannot write /proc/perdure"),
    ],
)
async def test_a_wrong_run_file_ends_the_run(
    stage: Any, change: dict[str, dict[str, Any]], text: str
) -> None:
    document = stage.document()
    wrong = {**document, **{key: {**document[key], **values} for key, values in change.items()}}
    failure = await failure_of(stage, {"config": wrong})
    assert failure.type == "ConfigurationError"
    assert text in failure.message
    assert not stage.root.exists()


async def test_a_digest_that_does_not_fit_is_refused(stage: Any) -> None:
    failure = await failure_of(stage, {"config": stage.document(), "config_sha256": "0" * 64})
    assert failure.type == "ConfigurationError"
    assert "render the run file again" in failure.message


async def test_a_root_that_is_a_file_is_refused_and_left_alone(stage: Any) -> None:
    stage.root.write_text("mine")
    failure = await stage.failure(await stage.start())
    assert failure.type == "ConfigurationError"
    assert str(stage.root) in failure.message
    assert stage.root.read_text() == "mine"


async def test_a_start_that_failed_while_preparing_goes_on_with_another_run_file(
    stage: Any,
) -> None:
    stage.fleet.script.fail("prepare", ConfigurationError("train row 2: 90 prompt tokens ..."))
    failure = await stage.failure(await stage.start())
    assert (failure.type, failure.message) == (
        "ConfigurationError",
        "train row 2: 90 prompt tokens ...",
    )
    assert stage.fleet.log[-2:] == ["revoke 1", "teardown"]
    outcome = await stage.run(stage.document(core={"max_context_length": 4096}))
    assert (outcome.state, outcome.updates) == (RunState.COMPLETE, 3)


@pytest.mark.parametrize("call", ["prepare", "collect 1", "save 1"])
async def test_a_full_disk_ends_the_run_and_the_same_command_goes_on(stage: Any, call: str) -> None:
    stage.fleet.script.fail(call, StorageFull("no space left to write x"))
    failure = await stage.failure(await stage.start())
    assert failure.type == "StorageFull"
    assert stage.fleet.log[-2:] == ["revoke 1", "teardown"]
    assert stage.fleet.caches_published == 0
    state = json.loads((stage.root / layout.WORKFLOW_JSON).read_text())
    assert (state["status"], state["error"]) == ("failed", "StorageFull: no space left to write x")
    outcome = await stage.run()
    assert (outcome.state, outcome.updates) == (RunState.COMPLETE, 3)


async def test_a_root_that_takes_no_more_files_still_frees_the_fleet(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = stage.fleet.script.hold("collect 1")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 1")

    def refuse(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as disk:
        for name in ("write_file", "append_line", "create_exclusive"):
            disk.setattr(f"activities.storage.atomic.{name}", refuse)
        full.set()
        failure = await stage.failure(handle)
        assert failure.type == "StorageFull"
        await stage.until_logged("teardown")
    assert (await stage.run()).state is RunState.COMPLETE


def test_a_request_survives_its_own_json() -> None:
    request = RunRequest(config={"a": [1, {"b": None}]}, config_sha256="x", take_over=True)
    assert parse_request([request.model_dump(mode="json")]) == request
    assert parse_request([{"config": {}, "of_a_newer_version": 1}]) == RunRequest()
