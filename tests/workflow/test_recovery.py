"""Lost actors, stale fences, fatal errors, dead engines."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from activities.storage import layout
from models.errors import (
    EngineLost,
    NonFiniteLoss,
    ProducerLost,
    ServiceUnreachable,
    StaleFence,
    StorageFull,
    TrainerLost,
)
from models.run import RunState
from workflows import options

pytestmark = pytest.mark.workflow


def calls(stage: Any, *names: str) -> list[str]:
    return [call for call in stage.fleet.log if call.startswith(names)]


async def test_a_lost_trainer_rewinds_to_the_checkpoint(stage: Any) -> None:
    stage.fleet.script.fail("optimize 3", TrainerLost("killed"))
    outcome = await stage.run(stage.document(training={"num_rollouts": 5, "save_interval": 2}))
    assert outcome.state is RunState.COMPLETE
    assert outcome.updates == 5
    # The checkpoint holds updates 0 and 1; update 2 is done twice, 3 had not been applied.
    assert calls(stage, "prepared", "optimize") == [
        "prepared 0 trainer,producer", "optimize 0", "optimize 1", "optimize 2", "optimize 3",
        "prepared 2 trainer,producer", "optimize 2", "optimize 3", "optimize 4",
    ]  # fmt: skip
    progress = await stage.progress()
    assert progress.recoveries == 1
    assert progress.recoveries_in_a_row == 0
    assert progress.updates_redone == 1
    assert progress.epoch == 2
    assert len(stage.store.read_json(layout.ATTEMPTS_JSON)) == 1
    epochs = [(row["update"], row["epoch"]) for row in stage.store.read_jsonl(layout.UPDATES).rows]
    assert epochs == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 2), (4, 2)]
    # The rebuilt fleet is published to before anything is sampled.
    after = stage.fleet.log[stage.fleet.log.index("prepared 2 trainer,producer") :]
    assert after[1] == "export_weights 2"


async def test_a_trainer_lost_before_any_checkpoint_starts_over(stage: Any) -> None:
    stage.fleet.script.fail("optimize 1", TrainerLost("killed"))
    outcome = await stage.run(stage.document(training={"num_rollouts": 3, "save_interval": 100}))
    assert outcome.updates == 3
    assert (await stage.progress()).updates_redone == 1


async def test_what_is_redone_is_evaluated_again(stage: Any) -> None:
    """The weights that were evaluated are gone; the redone ones need not be the same."""
    stage.fleet.script.fail("optimize 4", TrainerLost("killed"))
    document = stage.document(
        training={"num_rollouts": 5, "save_interval": 3}, evaluation={"interval": 2}
    )
    await stage.run(document)
    assert calls(stage, "prepared", "evaluate") == [
        "prepared 0 trainer,producer", "evaluate 0 initial", "evaluate 2 periodic",
        "evaluate 4 periodic",
        "prepared 3 trainer,producer", "evaluate 4 periodic", "evaluate 5 final",
    ]  # fmt: skip


async def test_a_lost_producer_leaves_the_trainer_alone(stage: Any) -> None:
    stage.fleet.script.fail("collect 1", ProducerLost("killed"))
    outcome = await stage.run()
    assert outcome.state is RunState.COMPLETE
    assert calls(stage, "prepared", "optimize") == [
        "prepared 0 trainer,producer", "optimize 0", "prepared 1 producer", "optimize 1",
        "optimize 2",
    ]  # fmt: skip
    assert (await stage.progress()).updates_redone == 0


async def test_a_producer_lost_ahead_lets_the_update_finish(stage: Any) -> None:
    optimize = stage.fleet.script.hold("optimize 0")
    stage.fleet.script.fail("collect 1", ProducerLost("killed"))
    handle = await stage.start(stage.document(core={"max_policy_lag": 1}))
    await stage.fleet.script.reached("collect 1")
    await stage.fleet.script.reached("optimize 0")
    optimize.set()
    assert (await handle.result()).state is RunState.COMPLETE
    assert calls(stage, "prepared", "optimize") == [
        "prepared 0 trainer,producer", "optimize 0", "prepared 1 producer", "optimize 1",
        "optimize 2",
    ]  # fmt: skip


async def test_a_trainer_lost_beside_a_collection_joins_it_first(stage: Any) -> None:
    stage.fleet.script.hold("collect 1")
    optimize = stage.fleet.script.hold("optimize 0")
    stage.fleet.script.fail("optimize 0", TrainerLost("killed"))
    handle = await stage.start(stage.document(core={"max_policy_lag": 1}))
    await stage.fleet.script.reached("collect 1")
    optimize.set()
    await stage.until_logged("collect 1 cancelled")
    stage.fleet.script.gates["collect 1"].set()
    assert (await handle.result()).state is RunState.COMPLETE
    log = stage.fleet.log
    assert log.index("collect 1 cancelled") < len(log) - 1 - log[::-1].index("prepare")


async def test_a_stale_fence_is_answered_by_a_new_epoch(stage: Any) -> None:
    stage.fleet.script.fail("optimize 1", StaleFence("a zombie took it"))
    outcome = await stage.run()
    assert outcome.state is RunState.COMPLETE
    assert (await stage.progress()).epoch == 2


async def test_recoveries_without_a_finished_update_are_bounded(stage: Any) -> None:
    stage.fleet.script.fail("optimize 1", *(TrainerLost("killed") for _ in range(5)))
    document = stage.document(launch={"max_recoveries": 2})
    failure = await stage.failure(await stage.start(document))
    assert failure.type == "TrainerLost"
    assert "max_recoveries = 2" in failure.message
    state = json.loads((stage.root / "workflow.json").read_text())
    assert state["status"] == "failed"
    assert state["error"].startswith("TrainerLost: killed")


@pytest.mark.parametrize("error", [NonFiniteLoss("loss is NaN"), StorageFull("disk is full")])
async def test_fatal_errors_end_the_run_at_once(stage: Any, error: Exception) -> None:
    stage.fleet.script.fail("optimize 1", error)
    failure = await stage.failure(await stage.start())
    assert failure.type == type(error).__name__
    assert calls(stage, "optimize", "revoke", "teardown") == [
        "optimize 0", "optimize 1", "revoke 1", "teardown",
    ]  # fmt: skip
    state = json.loads((stage.root / "workflow.json").read_text())
    assert state["status"] == "failed"
    assert state["error"] == f"{type(error).__name__}: {error}"


async def test_a_full_disk_leaves_the_run_resumable(stage: Any) -> None:
    stage.fleet.script.fail("save 1", StorageFull("disk is full"))
    failure = await stage.failure(await stage.start())
    assert failure.type == "StorageFull"
    assert (await stage.run()).state is RunState.COMPLETE


async def test_an_unreachable_service_is_tried_again(stage: Any) -> None:
    stage.fleet.script.fail("collect 1", ServiceUnreachable("busy"))
    outcome = await stage.run()
    assert outcome.state is RunState.COMPLETE
    assert calls(stage, "collect 1") == ["collect 1", "collect 1"]
    assert (await stage.progress()).recoveries == 0


async def test_an_update_whose_report_was_lost_is_not_done_twice(stage: Any) -> None:
    """The worker dies after the trainer applied the update: the retry gets the recorded report."""
    optimize = stage.fleet.script.hold("optimize 1")
    handle = await stage.start()
    await stage.fleet.script.reached("optimize 1")
    append = stage.tracker.log
    failed: list[bool] = []

    def crash_once(run: Any, metrics: Any) -> None:
        if not failed:
            failed.append(True)
            raise RuntimeError("the worker dies here")
        append(run, metrics)

    stage.tracker.log = crash_once
    optimize.set()
    assert (await handle.result()).state is RunState.COMPLETE
    assert failed
    assert calls(stage, "optimize 1") == ["optimize 1", "optimize 1"]
    assert stage.fleet.all_applied == [0, 1, 2]


async def test_an_engine_that_dies_while_sampling_is_replaced_and_loaded(
    make_stage: Callable[..., Any],
) -> None:
    stage = await make_stage(num_engines=2)
    gate = stage.fleet.script.hold("collect 1")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 1")
    stage.fleet.kill_engine(1)
    await stage.fleet.script.reached("load engine-1 1")
    await stage.until_logged("respawned engine-1")
    await stage.until(lambda: "http://engine-1.1" in stage.fleet.live_producer.urls)
    assert stage.fleet.engine_list[1].version == 1
    gate.set()
    assert (await handle.result()).state is RunState.COMPLETE
    assert (await stage.progress()).recoveries == 0


async def test_an_engine_that_cannot_be_replaced_is_rebuilt_under_a_new_epoch(stage: Any) -> None:
    gate = stage.fleet.script.hold("collect 1")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 1")
    stage.fleet.script.fail("load engine-0 1", EngineLost("no memory"))
    stage.fleet.kill_engine(0)
    await stage.until_logged("prepared 1 ")
    gate.set()
    assert (await handle.result()).state is RunState.COMPLETE
    assert (await stage.progress()).recoveries == 1


async def test_wrong_bytes_in_an_engine_and_its_replacement_end_the_run(stage: Any) -> None:
    gate = stage.fleet.script.hold("collect 0")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 0")
    ensure = stage.fleet.ensure_engines

    async def ensure_with_a_bad_disk(*arguments: Any) -> Any:
        former = list(stage.fleet.engine_list)
        engines = await ensure(*arguments)
        for engine in stage.fleet.engine_list:
            if engine not in former:
                engine.corrupt_loads = 1
        return engines

    stage.fleet.ensure_engines = ensure_with_a_bad_disk
    stage.fleet.engine_list[0].corrupt_loads = 1
    gate.set()
    failure = await stage.failure(handle)
    assert failure.type == "DigestMismatch"
    assert "engine-0" in failure.message


async def test_one_bad_load_is_repaired_within_the_publication(stage: Any) -> None:
    gate = stage.fleet.script.hold("collect 0")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 0")
    stage.fleet.engine_list[0].corrupt_loads = 1
    gate.set()
    assert (await handle.result()).state is RunState.COMPLETE
    assert calls(stage, "load engine-0 1") == ["load engine-0 1"] * 2


@pytest.mark.parametrize(
    ("name", "call"), [("PUBLISH", "export_weights 2"), ("CHECKPOINT", "save 1")]
)
async def test_a_trainer_that_hangs_is_given_up_in_time(
    stage: Any, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    """Each attempt is bounded, and so are all of them together; then the fleet is rebuilt."""
    whole = getattr(options, name)
    assert whole.schedule_to_close_s <= 3 * whole.start_to_close_s
    short = replace(whole, start_to_close_s=0.5, schedule_to_close_s=1.0)
    monkeypatch.setattr(options, name, short)
    gate = stage.fleet.script.hold(call)
    handle = await stage.start()
    await stage.fleet.script.reached(call)
    await stage.until(lambda: len(calls(stage, "prepared")) == 2)
    gate.set()
    assert (await handle.result()).updates == 3
    progress = await stage.progress()
    assert (progress.recoveries, progress.updates_redone) == (1, 0)
    assert calls(stage, "optimize") == ["optimize 0", "optimize 1", "optimize 2"]
