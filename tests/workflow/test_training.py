"""The whole workflow against a fake fleet: order of stages, cadences, artifacts, ends."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from activities.storage import layout
from activities.storage.commit import newest_checkpoint
from models.run import RunState

pytestmark = pytest.mark.workflow


def calls(stage: Any, *names: str) -> list[str]:
    """The fleet's log, reduced to calls that start with one of the names."""
    return [call for call in stage.fleet.log if call.startswith(names)]


def state_of(stage: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((stage.root / "workflow.json").read_text())
    return answer


async def test_sequential_run_does_its_stages_in_order(stage: Any) -> None:
    outcome = await stage.run()
    assert outcome.state is RunState.COMPLETE
    assert outcome.completed_rollout_ids == (0, 2)
    assert outcome.updates == outcome.policy_version == 3
    assert stage.fleet.log == [
        "prepare", "prepared 0 trainer,producer",
        "export_weights 0", "load engine-0 0",
        "evaluate 0 initial",
        "collect 0", "optimize 0", "export_weights 1", "load engine-0 1",
        "collect 1", "optimize 1", "export_weights 2", "load engine-0 2",
        "data_state 1", "save 1", "evaluate 2 periodic",
        "collect 2", "optimize 2", "export_weights 3", "load engine-0 3",
        "data_state 2", "save 2", "evaluate 3 final",
        "revoke 1", "teardown",
    ]  # fmt: skip


async def test_overlapped_run_samples_one_update_ahead(stage: Any) -> None:
    ahead = stage.fleet.script.hold("collect 1")
    handle = await stage.start(stage.document(core={"max_policy_lag": 1}))
    await stage.fleet.script.reached("collect 1")
    # collect(1) is open; optimize(0) must finish beside it and publication must wait for it.
    await stage.fleet.script.reached("optimize 0")
    assert "export_weights 1" not in stage.fleet.log
    ahead.set()
    outcome = await handle.result()
    assert outcome.state is RunState.COMPLETE
    sampled = {call.update: call for call in stage.fleet.all_requests}
    assert {update: call.policy_version for update, call in sampled.items()} == {0: 0, 1: 0, 2: 1}
    assert {update: call.consumed_through for update, call in sampled.items()} == {
        0: -1,
        1: -1,
        2: 0,
    }
    order = calls(stage, "optimize", "export_weights", "save", "evaluate")
    assert order == [
        "export_weights 0", "evaluate 0 initial",
        "optimize 0", "export_weights 1",
        "optimize 1", "export_weights 2", "save 1", "evaluate 2 periodic",
        "optimize 2", "export_weights 3", "save 2", "evaluate 3 final",
    ]  # fmt: skip
    lags = [row["train/lag"] for row in stage.rows("train")]
    assert lags == [0, 1, 1]


async def test_artifacts_tell_the_run(stage: Any) -> None:
    document = stage.document(output={"export_hf": True, "root": str(stage.root)})
    outcome = await stage.run(document)
    assert outcome.export_hf == "export-hf"
    state = state_of(stage)
    assert state["status"] == "complete"
    assert state["run_id"] == f"train/{stage.name}"
    assert state["epoch"] == 1
    assert state["update"] == 3
    assert state["attempt"] == 0
    assert state["started_unix"] <= state["training_started_unix"] <= state["finished_unix"]
    assert state["result"] == {
        "completed_rollout_ids": [0, 1, 2],
        "start_rollout_id": 0,
        "export_hf": "export-hf",
        "stopped_for_time": False,
    }
    timing = stage.store.read_jsonl(layout.DRIVER_TIMING).rows
    assert all(row["passed"] for row in timing)
    for name in ("generation_wait", "training", "publication"):
        assert [row["rollout_id"] for row in timing if row["stage"] == name] == [0, 1, 2]
    assert [row["stage"] for row in timing][:3] == [
        "placement",
        "initial_publication",
        "evaluation",
    ]
    assert [row["rollout_id"] for row in timing if row["stage"] == "checkpoint"] == [1, 2]
    assert timing[-1]["stage"] == "final_hf_export"
    assert [row["version"] for row in stage.store.read_jsonl(layout.PUBLICATION).rows] == [
        0,
        1,
        2,
        3,
    ]
    updates = stage.store.read_jsonl(layout.UPDATES).rows
    assert [(row["update"], row["epoch"], row["policy_version"]) for row in updates] == [
        (0, 1, 1),
        (1, 1, 2),
        (2, 1, 3),
    ]
    assert [row["rollout/step"] for row in stage.rows("rollout")] == [0, 1, 2]
    assert [row["train/step"] for row in stage.rows("train")] == [0, 1, 2]
    assert [row["eval/step"] for row in stage.rows("eval")] == [0, 2, 3]
    assert [row["rollout/reward"] for row in stage.rows("rollout")] == pytest.approx(
        [0.10, 0.11, 0.12]
    )
    assert [row["train/rollout_id"] for row in stage.tracker.rows if "train/loss" in row] == [
        0,
        1,
        2,
    ]
    assert stage.store.read_json(layout.ATTEMPTS_JSON)[0]["attempt"] == 0
    assert stage.store.read_json(layout.PLAN_JSON)["loop"]["num_rollouts"] == 3


async def test_an_update_without_signal_is_not_published_again(stage: Any) -> None:
    gate = stage.fleet.script.hold("collect 0")
    handle = await stage.start()
    await stage.fleet.script.reached("collect 0")
    stage.fleet.live_trainer.no_signal = {1}
    gate.set()
    outcome = await handle.result()
    assert outcome.policy_version == 2
    assert calls(stage, "export_weights") == [
        "export_weights 0", "export_weights 1", "export_weights 2",
    ]  # fmt: skip


async def test_engines_that_gave_their_memory_get_it_back_without_a_new_version(stage: Any) -> None:
    gate = stage.fleet.script.hold("collect 0")
    handle = await stage.start(stage.document(placement={"mode": "colocated"}))
    await stage.fleet.script.reached("collect 0")
    stage.fleet.live_trainer.no_signal = {1, 2}
    gate.set()
    outcome = await handle.result()
    assert outcome.policy_version == 1
    rows = stage.store.read_jsonl(layout.PUBLICATION).rows
    assert [row["version"] for row in rows] == [0, 1, 1, 1]
    turns = ("release engine-0", "wake engine-0", "collect", "evaluate")
    log = [call for call in stage.fleet.log if call.startswith(turns)]
    for before, after in pairwise(log):
        assert not (before.startswith("release") and after.startswith(("collect", "evaluate")))
    assert sum(call.startswith("wake") for call in log) == 3


async def test_continue_as_new_carries_everything(stage: Any) -> None:
    document = stage.document(
        training={"num_rollouts": 6},
        core={"continue_as_new_updates": 2},
        evaluation={"interval": 6, "initial": False},
    )
    handle = await stage.start(document)
    outcome = await handle.result()
    assert outcome.completed_rollout_ids == (0, 5)
    assert calls(stage, "prepared") == ["prepared 0 trainer,producer"]
    assert calls(stage, "optimize") == [f"optimize {update}" for update in range(6)]
    assert calls(stage, "export_weights") == [f"export_weights {v}" for v in range(7)]
    progress = await stage.progress()
    # One hand-over to the fleet's queue, then after updates 2 and 4.
    assert progress.chain_index == 3
    assert len(progress.reward_recent) == 6
    assert progress.reward_first == pytest.approx(0.10)
    assert progress.reward_last == pytest.approx(0.15)
    assert len(stage.store.read_json(layout.ATTEMPTS_JSON)) == 1
    assert state_of(stage)["epoch"] == 1


async def test_overlap_survives_continue_as_new(stage: Any) -> None:
    document = stage.document(
        training={"num_rollouts": 6},
        core={"continue_as_new_updates": 2, "max_policy_lag": 1},
    )
    outcome = await stage.run(document)
    assert outcome.updates == 6
    assert calls(stage, "optimize") == [f"optimize {update}" for update in range(6)]


async def test_soft_deadline_completes_early(stage: Any) -> None:
    document = stage.document(
        core={"max_run_seconds": 0.001},
        training={"num_rollouts": 50, "save_interval": 20},
        evaluation={"interval": 20, "initial": False},
        output={"export_hf": True, "root": str(stage.root)},
    )
    outcome = await stage.run(document)
    assert outcome.state is RunState.COMPLETE
    assert outcome.stopped_for_time
    assert outcome.completed_rollout_ids == (0, 0)
    assert calls(stage, "save", "evaluate", "export") == [
        "export_weights 0", "export_weights 1", "save 0", "evaluate 1 final", "export",
    ]  # fmt: skip
    assert state_of(stage)["result"]["stopped_for_time"] is True


async def test_the_start_of_the_fleet_counts_for_the_soft_deadline(stage: Any) -> None:
    stage.fleet.fleet_seconds = 2000.0
    document = stage.document(
        core={"max_run_seconds": 1000}, training={"num_rollouts": 50, "save_interval": 20}
    )
    outcome = await stage.run(document)
    assert outcome.stopped_for_time
    assert outcome.completed_rollout_ids == (0, 0)


async def test_a_stopped_run_is_resumed_from_its_checkpoint(stage: Any) -> None:
    gate = stage.fleet.script.hold("optimize 1")
    handle = await stage.start(stage.document(training={"num_rollouts": 4, "save_interval": 100}))
    await stage.fleet.script.reached("optimize 1")
    await handle.execute_update("stop", {"reason": "enough"})
    gate.set()
    outcome = await handle.result()
    assert outcome.state is RunState.STOPPED
    assert outcome.completed_rollout_ids == (0, 1)
    assert state_of(stage)["status"] == "stopped"
    assert stage.fleet.torn_down
    committed = newest_checkpoint(stage.store)
    assert committed is not None
    assert committed.update == 1

    stage.fleet.log.clear()
    outcome = await stage.run(stage.document(training={"num_rollouts": 4, "save_interval": 100}))
    assert outcome.state is RunState.COMPLETE
    assert outcome.completed_rollout_ids == (2, 3)
    assert outcome.start_rollout_id == 2
    assert calls(stage, "prepared", "optimize") == [
        "prepared 2 trainer,producer", "optimize 2", "optimize 3",
    ]  # fmt: skip
    assert [row["attempt"] for row in stage.store.read_json(layout.ATTEMPTS_JSON)] == [0, 1]
    assert state_of(stage)["epoch"] == 2


async def test_revoked_before_torn_down_before_recorded(stage: Any) -> None:
    seen: list[str] = []
    teardown = stage.fleet.teardown

    async def watched(run: Any) -> None:
        seen.append(state_of(stage)["status"])
        await teardown(run)

    stage.fleet.teardown = watched
    await stage.run()
    assert calls(stage, "revoke", "teardown") == ["revoke 1", "teardown"]
    assert seen == ["training"]
    assert stage.fleet.caches_published == 1
    assert stage.store.exists("lease/revoked-00000001.json")


async def test_search_attributes_and_details_are_set(stage: Any, temporal_client: Any) -> None:
    handle = await stage.start()
    await handle.result()
    described = await handle.describe()
    pairs = described.typed_search_attributes.search_attributes
    found = {pair.key.name: pair.value for pair in pairs}
    assert found["RunState"] == "complete"
    assert found["PolicyVersion"] == 3
    assert found["UpdateIndex"] == 3
    assert found["ModelName"] == "tiny"
    assert found["RecipeName"] == stage.name
    metadata = await handle.query("__temporal_workflow_metadata")
    details = metadata.current_details
    assert "complete: update 3 of 3" in details
    assert "after update 3 (`checkpoints/core/rollout_0000002" in details


async def test_activities_carry_a_summary(stage: Any) -> None:
    handle = await stage.start()
    await handle.result()
    summaries = [
        json.loads(event.user_metadata.summary.data)
        async for event in handle.fetch_history_events()
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    assert "optimize update 1" in summaries
    assert "evaluate final after update 3" in summaries


async def test_a_foreign_root_is_refused_naming_its_owner(
    make_stage: Callable[..., Any],
) -> None:
    first, second = await make_stage(), await make_stage()
    await first.run()
    document = second.document(output={"root": str(first.root)})
    failure = await second.failure(await second.start(document))
    assert failure.type == "OwnershipError"
    assert f"train/{first.name}" in failure.message
    assert state_of(first)["status"] == "complete"


async def test_a_complete_run_and_a_changed_one_are_refused(stage: Any) -> None:
    await stage.run()
    before = (stage.root / "workflow.json").read_bytes()
    failure = await stage.failure(await stage.start())
    assert failure.type == "ConfigurationError"
    assert "complete" in failure.message
    changed = stage.document(optimizer={"learning_rate": 0.5})
    failure = await stage.failure(await stage.start(changed))
    assert failure.type == "ConfigurationError"
    assert "optimizer.learning_rate" in failure.message
    assert failure.message.count("started with") == 1
    assert (stage.root / "workflow.json").read_bytes() == before


async def test_the_attempt_ledger_refuses_one_start_too_many(stage: Any) -> None:
    document = stage.document(launch={"max_retries": 0})
    gate = stage.fleet.script.hold("collect 0")
    handle = await stage.start(document)
    await stage.fleet.script.reached("collect 0")
    await handle.execute_update("stop", {"reason": "again", "checkpoint": False})
    gate.set()
    assert (await handle.result()).state is RunState.STOPPED
    failure = await stage.failure(await stage.start(document))
    assert "max_retries" in failure.message
    document = stage.document(launch={"max_retries": 1})
    assert (await stage.run(document)).state is RunState.COMPLETE
