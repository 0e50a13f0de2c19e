"""``perdure run`` and its siblings against the real workflow, with the fleet faked."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from models.errors import ConfigurationError, RequestRefused, ServiceUnreachable
from models.run import StopRequest
from tests.support.desk import Desk, asks, last_json, until
from workers.cli.errors import DONE, FAILED, INTERRUPTED, USAGE
from workers.cli.overview import overview
from workers.cli.server import look, request_cancel, request_update
from workers.cli.session import wait_for

pytestmark = pytest.mark.workflow


@pytest.fixture
def desk(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("PERDURE_LAUNCH_RECEIPTS", str(tmp_path / "launches"))
    return Desk(stage, tmp_path)


async def test_a_run_is_followed_to_its_end_and_not_run_twice(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = desk.loaded()
    assert await desk.run(loaded) == DONE
    first = last_json(capsys)
    assert first["run_id"] == loaded.spec.run_id
    assert (first["state"], first["updates"]) == ("complete", 3)
    assert first["root"] == str(desk.stage.root)
    assert first["reward_first"] is not None
    log = list(desk.stage.fleet.log)
    assert await desk.run(loaded) == DONE
    assert last_json(capsys) == first
    assert desk.stage.fleet.log == log


async def test_a_complete_run_refuses_another_configuration(desk: Desk) -> None:
    await desk.run(desk.loaded())
    other = desk.loaded(training={"num_rollouts": 4})
    with pytest.raises(
        ConfigurationError,
        match=r"is complete with another configuration: .*\(different: training\.num_rollouts\)",
    ):
        await desk.run(other)


async def test_a_second_command_joins_and_another_configuration_is_refused(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = desk.loaded(training={"num_rollouts": 400})
    assert await desk.run(loaded, follow=False) == DONE
    other = desk.loaded(training={"num_rollouts": 500})
    with pytest.raises(ConfigurationError) as caught:
        await desk.run(other)
    assert loaded.identity in caught.value.message
    assert other.identity in caught.value.message
    capsys.readouterr()
    patient = desk.loaded("launch.max_retries=7", training={"num_rollouts": 400})
    joined = asyncio.create_task(desk.run(patient))
    await until(lambda: asks(desk, "training"))
    await request_update(
        desk.stage.client, loaded.spec.run_id, "stop", StopRequest(reason="enough")
    )
    assert await joined == FAILED
    assert last_json(capsys)["state"] == "stopped"
    assert desk.stage.fleet.log.count("teardown") == 1


async def test_a_stopped_run_starts_again_and_resumes(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = desk.loaded(training={"num_rollouts": 12})
    await desk.run(loaded, follow=False)
    await until(lambda: asks(desk, "training"))
    await request_update(desk.stage.client, loaded.spec.run_id, "stop", StopRequest())
    assert await wait_for(desk.place, loaded.spec.run_id, as_json=True) == FAILED
    capsys.readouterr()
    assert await desk.run(loaded) == DONE
    line = last_json(capsys)
    assert (line["state"], line["updates"]) == ("complete", 12)


async def test_refused_requests_say_why(desk: Desk) -> None:
    loaded = desk.loaded(training={"num_rollouts": 400})
    run_id, client = loaded.spec.run_id, desk.stage.client
    await desk.run(loaded, follow=False)
    await until(lambda: asks(desk, "training"))
    with pytest.raises(RequestRefused, match="the run is not paused"):
        await request_update(client, run_id, "resume")
    await request_update(client, run_id, "pause")
    with pytest.raises(RequestRefused, match="paused already"):
        await request_update(client, run_id, "pause")
    await request_cancel(client, run_id)
    assert await wait_for(desk.place, run_id, as_json=True) == FAILED
    with pytest.raises(RequestRefused, match="does not run"):
        await request_update(client, run_id, "pause")


async def test_a_configuration_error_of_the_claim_is_exit_2(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.stage.root.parent.mkdir(parents=True, exist_ok=True)
    desk.stage.root.write_text("a file where the output root should be")
    assert await desk.run(desk.loaded()) == USAGE
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["state"] == "failed"
    assert captured.err.splitlines()[-1].startswith("perdure: train/")


async def test_a_ray_cluster_that_does_not_answer_is_told_before_anything_starts(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = desk.loaded()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ServiceUnreachable, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        await desk.run(loaded)
    assert await look(desk.stage.client, loaded.spec.run_id) is None
    monkeypatch.delenv("RAY_ADDRESS")
    assert await desk.run(loaded) == DONE


async def test_status_of_a_canceled_run_tells_how_far_it_came(desk: Desk) -> None:
    """Such a run has no outcome, and its root no worker that answers: its files tell."""
    gate = desk.stage.fleet.script.hold("collect 2")
    loaded = desk.loaded(training={"num_rollouts": 400})
    await desk.run(loaded, follow=False)
    await desk.stage.fleet.script.reached("collect 2")
    await request_cancel(desk.stage.client, loaded.spec.run_id)
    gate.set()

    async def canceled() -> bool:
        view = await look(desk.stage.client, loaded.spec.run_id)
        return view is not None and view.status == "canceled"

    await until(canceled)
    (run,) = (await overview(desk.place, loaded.spec.run_id, None))["runs"]
    assert (run["state"], run["update"], run["policy_version"]) == ("stopped", 2, 2)


async def test_status_reports_runs_and_actors(desk: Desk) -> None:
    loaded = desk.loaded(training={"num_rollouts": 400})
    await desk.run(loaded, follow=False)
    await until(lambda: asks(desk, "training"))
    actor = {"role": "trainer", "rank": 0, "pid": 1, "host": "localhost", "incarnation": 2}
    (desk.stage.root / "fleet.json").write_text(json.dumps([actor]))
    report = await overview(desk.place, loaded.spec.run_id, None)
    (run,) = report["runs"]
    assert run["run_id"] == loaded.spec.run_id
    assert run["state"] == "training"
    assert run["root"] == str(desk.stage.root)
    assert run["total"] == 400
    assert {key: run["actors"][0][key] for key in actor} == actor
    assert run["actors"][0]["alive"] is True
    everything = await overview(desk.place, None, None)
    assert loaded.spec.run_id in {each["run_id"] for each in everything["runs"]}
    assert (await overview(desk.place, "train/nobody", None))["runs"] == []
    await request_cancel(desk.stage.client, loaded.spec.run_id)


async def test_people_see_a_line_an_update_and_the_last_screen(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    from workers.cli import output

    output.out.cache_clear()
    output.err.cache_clear()
    try:
        assert await desk.run(desk.loaded(), as_json=False) == DONE
        captured = capsys.readouterr()
    finally:
        output.out.cache_clear()
        output.err.cache_clear()
    assert "complete, 3 of 3 updates" in captured.out
    assert "started" in captured.err


async def test_ctrl_c_stops_following_and_the_run_goes_on(desk: Desk) -> None:
    loaded = desk.loaded(training={"num_rollouts": 400})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers", "run", str(desk.file)),
        *("--address", str(desk.place.address)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    await until(lambda: asks(desk, "training"))
    process.send_signal(signal.SIGINT)
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == INTERRUPTED
    detached, stop = stderr.decode().splitlines()[-2:]
    assert detached == (
        f"detached; {loaded.spec.run_id} goes on. Follow it again: perdure run {desk.file}"
    )
    assert stop == f"stop it: perdure stop {loaded.spec.name}"
    view = await look(desk.stage.client, loaded.spec.run_id)
    assert view is not None
    assert view.is_open
    await request_cancel(desk.stage.client, loaded.spec.run_id)
