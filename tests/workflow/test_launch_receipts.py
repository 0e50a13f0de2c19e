"""Launch receipts: one a start, kept by the submitter, compared by ``status``."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.errors import ConfigurationError
from models.run import StopRequest
from tests.support.desk import Desk, asks, until
from workers.cli.errors import DONE
from workers.cli.launches import receipt_path
from workers.cli.overview import overview
from workers.cli.server import look, request_update
from workers.cli.session import wait_for
from workers.cli.status_details import add_details
from workers.source_digest import source_digest

pytestmark = pytest.mark.workflow


@pytest.fixture
def desk(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("PERDURE_LAUNCH_RECEIPTS", str(tmp_path / "launches"))
    return Desk(stage, tmp_path)


async def details(desk: Desk) -> dict[str, Any]:
    """The run as ``status`` shows it."""
    run: dict[str, Any] = (await overview(desk.place, f"train/{desk.stage.name}", None))["runs"][0]
    await add_details(run, desk.place, None)
    return run


async def test_every_start_leaves_a_receipt_and_status_compares_with_it(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"training": {"num_rollouts": 12}, "launch": {"env": {"SITE_FLAG": "kept-out-1"}}}
    loaded = desk.loaded(**sections)
    await desk.run(loaded, follow=False)
    await until(lambda: asks(desk, "training"))
    await request_update(desk.stage.client, loaded.spec.run_id, "stop", StopRequest())
    await wait_for(desk.place, loaded.spec.run_id, as_json=True)
    first = json.loads(receipt_path(loaded.spec.name, str(desk.stage.root)).read_text())
    assert await desk.run(loaded) == DONE
    second = json.loads(receipt_path(loaded.spec.name, str(desk.stage.root)).read_text())
    handles = [
        await desk.stage.client.get_workflow_handle(
            loaded.spec.run_id, run_id=each["experiment_id"]
        ).describe()
        for each in (first, second)
    ]
    assert handles[0].id == handles[1].id == second["run_id"]
    kept = sorted(path.name for path in (tmp_path / "launches").iterdir())
    assert len(kept) == 2
    assert kept[0].endswith(f"-{first['experiment_id']}.json")
    assert second["identity_sha256"] == loaded.identity
    assert second["spec"]["training"]["num_rollouts"] == 12
    assert "kept-out-1" not in json.dumps(second)
    assert second["source_digest"] == source_digest()
    assert [(each["task"], each["replicas"]) for each in second["placements"]] == [
        ("trainer", 1),
        ("engine", 1),
    ]
    capsys.readouterr()
    run = await details(desk)
    assert (run["config_matches_receipt"], run["warnings"]) == (True, [])
    path = receipt_path(loaded.spec.name, str(desk.stage.root))
    path.write_text(json.dumps(second | {"identity_sha256": "0" * 64}))
    run = await details(desk)
    assert run["config_matches_receipt"] is False
    assert run["warnings"] == [
        f"{path} was launched as {'0' * 64}, this run means {loaded.identity}"
    ]


async def test_a_folder_that_takes_no_receipts_is_told_before_anything_starts(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PERDURE_LAUNCH_RECEIPTS", str(tmp_path / "file" / "launches"))
    loaded = desk.loaded()
    with pytest.raises(ConfigurationError, match="PERDURE_LAUNCH_RECEIPTS to another folder"):
        await desk.run(loaded)
    assert await look(desk.stage.client, loaded.spec.run_id) is None
