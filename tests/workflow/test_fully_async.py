"""The loop of a fully async run: collections in turn, publications in between, evaluations."""

from collections.abc import Callable
from typing import Any

import pytest

from models.errors import ProducerLost, ServiceUnreachable
from models.run import RunState

pytestmark = pytest.mark.workflow

STAGES = ("collect", "optimize", "export_weights", "save", "evaluate ", "evaluate_snapshot")


@pytest.fixture
async def async_stage(make_stage: Callable[..., Any]) -> Any:
    """A run with two engines and a router."""
    return await make_stage(2, with_router=True)


def fully_async(stage: Any, **sections: dict[str, Any]) -> dict[str, Any]:
    sections["async"] = {"fully_async": True} | sections.get("async", {})
    sections["core"] = {"publication_mode": "refresh", "max_policy_lag": 2} | sections.get(
        "core", {}
    )
    document: dict[str, Any] = stage.document(**sections)
    return document


def calls(stage: Any, *names: str) -> list[str]:
    return [call for call in stage.fleet.log if call.startswith(names)]


async def details_of(handle: Any) -> str:
    metadata = await handle.query("__temporal_workflow_metadata")
    text: str = metadata.current_details
    return text


async def test_collections_are_taken_in_their_turn(async_stage: Any) -> None:
    """The producer samples by itself, so nothing is asked for ahead of a publication."""
    handle = await async_stage.start(fully_async(async_stage))
    outcome = await handle.result()
    assert outcome.state is RunState.COMPLETE
    assert calls(async_stage, *STAGES) == [
        "export_weights 0", "evaluate 0 initial",
        "collect 0", "optimize 0", "export_weights 1",
        "collect 1", "optimize 1", "export_weights 2", "save 1", "evaluate 2 periodic",
        "collect 2", "optimize 2", "export_weights 3", "save 2", "evaluate 3 final",
    ]  # fmt: skip
    asked = [(each.update, each.consumed_through) for each in async_stage.fleet.all_requests]
    assert asked == [(0, -1), (1, 0), (2, 1)]
    assert calls(async_stage, "begin_publication", "end_publication") == [
        f"{edge}_publication {version}" for version in range(4) for edge in ("begin", "end")
    ]
    details = await details_of(handle)
    assert "- mode: fully asynchronous, lag at most 2" in details


@pytest.mark.parametrize(
    ("core", "mode"), [({}, "sequential"), ({"max_policy_lag": 1}, "one collection ahead")]
)
async def test_details_name_the_mode(stage: Any, core: dict[str, Any], mode: str) -> None:
    handle = await stage.start(stage.document(core=core, training={"num_rollouts": 1}))
    await handle.result()
    assert f"- mode: {mode}\n" in await details_of(handle)


async def test_delivered_tokens_count_against_the_time_of_an_update(async_stage: Any) -> None:
    """The fake says 40 tokens in 0.5 s, but they were sampled while the trainer worked."""
    gate = async_stage.fleet.script.hold("optimize 0")
    handle = await async_stage.start(fully_async(async_stage, training={"num_rollouts": 1}))
    await async_stage.fleet.script.reached("optimize 0")
    gate.set()
    await handle.result()
    progress = await async_stage.progress()
    assert progress.tokens_per_second == pytest.approx(40 / progress.seconds_per_update)


async def test_an_evaluation_that_fails_once_is_retried_alone(async_stage: Any) -> None:
    """Due after update 4 of 8: published, committed, evaluated twice, and only then trained on."""
    async_stage.fleet.script.fail("evaluate 4 periodic", ServiceUnreachable("an engine hung"))
    document = fully_async(
        async_stage,
        training={"num_rollouts": 8, "save_interval": 4},
        evaluation={"interval": 4, "initial": False},
    )
    outcome = await async_stage.run(document)
    assert outcome.state is RunState.COMPLETE
    log = calls(async_stage, *STAGES)
    first = log.index("optimize 3")
    assert log[first : log.index("collect 4") + 1] == [
        "optimize 3", "export_weights 4", "save 3",
        "evaluate 4 periodic", "evaluate 4 periodic", "collect 4",
    ]  # fmt: skip
    assert (await async_stage.progress()).recoveries == 0
    assert [call for call in log if call.startswith("optimize")] == [
        f"optimize {update}" for update in range(8)
    ]
    assert [(row["update"], row["eval/step"]) for row in async_stage.rows("eval")] == [
        (4, 4), (8, 8),
    ]  # fmt: skip
    assert outcome.evaluation is not None
    assert (outcome.evaluation.update, outcome.evaluation.policy_version) == (8, 8)


async def test_a_producer_lost_in_an_evaluation_costs_no_update(async_stage: Any) -> None:
    async_stage.fleet.script.fail("evaluate 2 periodic", ProducerLost("killed"))
    outcome = await async_stage.run(fully_async(async_stage))
    assert outcome.state is RunState.COMPLETE
    assert (await async_stage.progress()).updates_redone == 0
    log = calls(async_stage, "prepared", "optimize", "export_weights", "evaluate ")
    after = log.index("prepared 2 producer")
    assert log[after : after + 3] == [
        "prepared 2 producer", "export_weights 2", "evaluate 2 periodic",
    ]  # fmt: skip
    assert [call for call in log if call.startswith("optimize")] == [
        "optimize 0", "optimize 1", "optimize 2",
    ]  # fmt: skip


async def test_a_deadline_ends_a_fully_async_run(async_stage: Any) -> None:
    document = fully_async(
        async_stage,
        core={"max_run_seconds": 0.001},
        training={"num_rollouts": 50, "save_interval": 20},
        evaluation={"interval": 20, "initial": False},
        output={"export_hf": True, "root": str(async_stage.root)},
    )
    outcome = await async_stage.run(document)
    assert outcome.stopped_for_time
    assert outcome.completed_rollout_ids == (0, 0)
    assert calls(async_stage, *STAGES, "export")[1:] == [
        "collect 0", "optimize 0", "export_weights 1", "save 0", "evaluate 1 final", "export",
    ]  # fmt: skip


async def test_a_paused_fully_async_run_asks_for_nothing(async_stage: Any) -> None:
    gate = async_stage.fleet.script.hold("optimize 0")
    handle = await async_stage.start(fully_async(async_stage))
    await async_stage.fleet.script.reached("optimize 0")
    await handle.execute_update("pause")
    gate.set()
    await async_stage.until_logged("export_weights 1")
    async_stage.fleet.script.hold("collect 1").set()
    progress = await handle.execute_update("checkpoint_now", result_type=None)
    assert progress is not None
    await async_stage.until_logged("save 0")
    assert "collect 1" not in async_stage.fleet.log
    await handle.execute_update("resume")
    assert (await handle.result()).state is RunState.COMPLETE
