"""Rewinding runs through the workflow: open, complete, refused, cut off in the claim."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from activities import rewinding
from activities.background.receipts import encoded
from activities.storage import layout
from activities.storage.commit import intact_checkpoints
from activities.storage.rewinds import read_rewinds
from models.background import EvaluationReceipt
from models.checkpoint import RewindRequest
from models.errors import ConfigurationError, RequestRefused
from models.evaluation import ReceiptStatus
from models.run import RunOutcome, RunRequest, StopRequest
from tests.support.desk import Desk, asks, until
from workers.cli.errors import DONE
from workers.cli.rewind_session import RewindSession
from workers.cli.server import request_update
from workers.cli.session import wait_for
from workflows.options import CONTROL_QUEUE

pytestmark = pytest.mark.workflow

MANY = {
    "training": {"num_rollouts": 6, "save_interval": 1},
    "core": {"checkpoint_keep_last": None},
}
STOP = StopRequest(reason="back", checkpoint=True)


@pytest.fixture
def desk(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("PERDURE_LAUNCH_RECEIPTS", str(tmp_path / "launches"))
    return Desk(stage, tmp_path)


def session(desk: Desk, updates: int) -> RewindSession:
    """A rewind of the desk's run, named by its id."""
    request = RewindRequest(updates=updates, reason="worse")
    run_id = f"train/{desk.stage.name}"
    return RewindSession(desk.place, run_id, request, None, run_id, ())


def rows(stage: Any) -> list[tuple[int, int]]:
    """(update, epoch) of each finished update, in order."""
    return [(row["update"], row["epoch"]) for row in stage.store.read_jsonl(layout.UPDATES).rows]


async def test_an_open_run_is_stopped_and_goes_on_from_the_checkpoint(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = desk.stage
    monkeypatch.setattr(stage.fleet, "teardown", _nothing)  # the trainer is left over
    loaded = desk.loaded(**MANY)
    gate = stage.fleet.script.hold("collect 4")
    await desk.run(loaded, follow=False)
    await stage.fleet.script.reached("collect 4")
    going = asyncio.create_task(session(desk, 2).run(STOP, 30))
    await until(lambda: _stopping(stage))
    gate.set()
    await asyncio.wait_for(going, 30)
    assert await wait_for(desk.place, loaded.spec.run_id, as_json=True) == DONE
    progress = await stage.progress()
    assert (progress.next_update, progress.first_update) == (6, 2)
    rewind = progress.rewind
    assert rewind is not None
    assert (rewind.updates, rewind.undone_updates, rewind.reason) == (2, 3, "worse")
    epoch = rewind.epoch
    assert rows(stage) == [
        *((update, 1) for update in range(5)),
        *((update, epoch) for update in range(2, 6)),
    ]
    kept = stage.store.read_jsonl(layout.METRICS).rows
    assert [row["update"] for row in kept if row["kind"] == "train"] == list(range(6))
    aside = layout.rewound_folder(epoch)
    saved = stage.store.list(f"{aside}/{layout.CHECKPOINT_FOLDERS}")
    assert [name[:15] for name in saved] == [f"rollout_000000{u}" for u in (2, 3, 4)]
    assert sorted(intact_checkpoints(stage.store)) == [1, 2, 3, 4, 5, 6]
    assert "prepared 2 trainer,producer" in stage.fleet.log
    receipts = sorted((desk.file.parent / "launches").glob("*.json"), key=lambda p: len(p.name))
    assert json.loads(receipts[0].read_text())["rewind"] == {"updates": 2, "reason": "worse"}


async def _nothing(run: Any) -> None:
    del run


async def _stopping(stage: Any) -> bool:
    return (await stage.progress()).stop is not None


async def test_a_complete_run_goes_back_and_is_completed_again(desk: Desk) -> None:
    loaded = desk.loaded(**MANY)
    assert await desk.run(loaded) == DONE
    await session(desk, 4).run(STOP, 30)
    assert await wait_for(desk.place, loaded.spec.run_id, as_json=True) == DONE
    assert rows(desk.stage)[-2:] == [(4, 2), (5, 2)]
    assert desk.stage.store.read_json(layout.WORKFLOW_JSON)["status"] == "complete"
    log = list(desk.stage.fleet.log)
    assert await desk.run(loaded) == DONE
    assert desk.stage.fleet.log == log


async def test_impossible_rewinds_leave_an_open_run_alone(desk: Desk) -> None:
    stage = desk.stage
    loaded = desk.loaded(**MANY)
    gate = stage.fleet.script.hold("collect 3")
    await desk.run(loaded, follow=False)
    await stage.fleet.script.reached("collect 3")
    for updates, reason in (
        (5, "only 3 are finished; there are checkpoints after 1, 2, 3 updates"),
        (0, "no intact checkpoint after 0 updates"),
        (3, "stands after 3 updates already"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            await session(desk, updates).run(STOP, 30)
    few = desk.loaded(**{**MANY, "core": {"checkpoint_keep_last": 3}})
    request = RewindRequest(updates=1)
    other = RewindSession(desk.place, few.spec.run_id, request, few, str(desk.file), ())
    with pytest.raises(ConfigurationError, match=r"core\.checkpoint_keep_last\).*perdure fork"):
        await other.run(STOP, 30)
    for change, reason in (
        ("launch.auto_resume=false", "launch.auto_resume is false"),
        ("launch.max_retries=0", "was started 1 times and launch.max_retries is 0"),
    ):
        barred = desk.loaded(change, **MANY)
        other = RewindSession(desk.place, barred.spec.run_id, request, barred, str(desk.file), ())
        with pytest.raises(ConfigurationError, match=reason):
            await other.run(STOP, 30)
    with pytest.raises(RequestRefused, match="background evaluation after 3 updates still runs"):
        await _with_open_evaluation(desk, 3)
    assert (await stage.progress()).stop is None
    gate.set()
    assert await wait_for(desk.place, loaded.spec.run_id, as_json=True) == DONE
    assert read_rewinds(stage.store) == []


async def _with_open_evaluation(desk: Desk, update: int) -> None:
    """Rewind to 2 updates beside a receipt of an evaluation whose workflow is open."""
    receipt = EvaluationReceipt(
        update=update,
        phase="periodic",
        status=ReceiptStatus.SUBMITTED,
        experiment_id=f"train/{desk.stage.name}",
    )
    rel = layout.eval_receipt(update, "0" * 16)
    desk.stage.store.write_bytes(rel, encoded(receipt))
    try:
        await session(desk, 2).run(STOP, 30)
    finally:
        desk.stage.store.remove_tree(rel)


async def test_a_stop_that_would_remove_the_target_is_refused(desk: Desk) -> None:
    stage = desk.stage
    loaded = desk.loaded(**{**MANY, "core": {"checkpoint_keep_last": 3}})
    gate = stage.fleet.script.hold("collect 3")
    await desk.run(loaded, follow=False)
    await stage.fleet.script.reached("collect 3")
    with pytest.raises(RequestRefused, match=r"keeps 3 checkpoints.*give --no-checkpoint"):
        await session(desk, 1).run(STOP, 30)
    await request_update(stage.client, loaded.spec.run_id, "stop", StopRequest(checkpoint=False))
    gate.set()
    await wait_for(desk.place, loaded.spec.run_id, as_json=True)


async def start(stage: Any, document: dict[str, Any], updates: int) -> Any:
    """As the stock command starts a rewind."""
    handle = await stage.client.start_workflow(
        "Training",
        RunRequest(config=document, rewind=RewindRequest(updates=updates)),
        result_type=RunOutcome,
        id=f"train/{stage.name}",
        task_queue=CONTROL_QUEUE,
    )
    stage.handles.append(handle)
    return handle


async def test_a_refused_claim_leaves_the_files_as_they_were(stage: Any) -> None:
    document = stage.document(**MANY)
    await stage.run(document)
    before = {path: path.read_bytes() for path in stage.root.rglob("*") if path.is_file()}
    failure = await stage.failure(await start(stage, document, 9))
    assert failure.type == "ConfigurationError"
    assert "only 6 are finished" in failure.message
    after = {path: path.read_bytes() for path in stage.root.rglob("*") if path.is_file()}
    assert after == before


async def test_a_claim_that_is_cut_off_rewinds_once(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = stage.document(**MANY)
    await stage.run(document)
    whole, failures = rewinding._write_state, iter((True, True))

    def cut_off(*arguments: Any) -> None:
        if next(failures, False):
            raise OSError("the worker went away")
        whole(*arguments)

    monkeypatch.setattr(rewinding, "_write_state", cut_off)
    outcome = await (await start(stage, document, 3)).result()
    assert (outcome.updates, outcome.start_rollout_id) == (6, 3)
    (rewind,) = read_rewinds(stage.store)
    # The first claim took epoch 2 and recorded under it; the third one finished under epoch 4.
    assert rewind.epoch == 2
    assert rows(stage)[-3:] == [(3, 4), (4, 4), (5, 4)]
    assert [row["attempt"] for row in stage.store.read_json(layout.ATTEMPTS_JSON)] == [0, 1]
    assert await asks(Desk(stage, stage.root.parent), "complete")


async def test_a_start_after_one_that_only_rewound_keeps_nothing_of_what_is_undone(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.fleet, "teardown", _nothing)  # the trainer is left over
    document = stage.document(**MANY)
    await stage.run(document)
    stage.fleet.script.hold("prepare")
    handle = await start(stage, document, 5)
    await until(lambda: _is_preparing(stage))
    await handle.terminate("lost")
    stage.fleet.script.gates.clear()
    outcome = await stage.run(document)
    assert (outcome.updates, outcome.start_rollout_id) == (6, 5)
    prepared = [entry for entry in stage.fleet.log if entry.startswith("prepared")]
    assert prepared[-1] == "prepared 5 trainer,producer"
    assert rows(stage)[-1] == (5, 3)


async def _is_preparing(stage: Any) -> bool:
    (progress, rewinds) = (await stage.progress(), read_rewinds(stage.store))
    return bool(rewinds) and progress.stage == "prepare"
