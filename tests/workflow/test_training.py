"""The whole workflow against a fake fleet: order of stages, cadences, artifacts."""

import json

import pytest

from models.run import RunState

pytestmark = pytest.mark.workflow


async def test_sequential_run_does_its_stages_in_order(stage) -> None:
    outcome = await stage.run()
    assert outcome.state is RunState.COMPLETE
    assert outcome.completed_rollout_ids == (0, 2)
    assert outcome.updates == 3
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
    state = json.loads((stage.root / "workflow.json").read_text())
    assert state["status"] == "complete"
    assert state["result"]["completed_rollout_ids"] == [0, 1, 2]
