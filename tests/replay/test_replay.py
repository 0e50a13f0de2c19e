"""The workflow code replays every recorded history: running runs survive a new version.

A change of ``workflows/`` that breaks one of these breaks runs that are under way; put it behind
``workflow.patched``. New scenarios are recorded by the workflow tests::

    PERDURE_RECORD_HISTORIES=FOLDER pytest tests/workflow -k NAME
"""

from pathlib import Path

import pytest
from temporalio.worker import Replayer

from tests.support.histories import read_history
from workers.plugin import perdure_plugin
from workflows import stages
from workflows.evaluation import BackgroundEvaluation
from workflows.retraining import Retraining
from workflows.training import Training

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json"))


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_recorded_history_replays(path: Path) -> None:
    workflows = [Training, BackgroundEvaluation, Retraining]
    replayer = Replayer(workflows=workflows, plugins=[perdure_plugin()])
    await replayer.replay_workflow(read_history(path))


def test_there_are_histories_of_every_kind_of_run() -> None:
    names = {path.stem for path in HISTORIES}
    assert {
        "claim", "sequential", "overlapped", "continued", "lost_trainer", "lost_beside_collection",
        "paused", "stopped", "cancelled", "deadline", "failed", "rewound", "rewound_claim",
        "fully_async", "fully_async_lost_producer",
        "background", "background_busy", "background_failed", "evaluation_that_waited",
        "retraining", "retraining_failed", "retraining_canceled", "retraining_joined",
    } <= names  # fmt: skip


async def test_a_changed_order_of_stages_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate itself works: a workflow that evaluates before it publishes does not replay."""
    monkeypatch.setattr(stages.RunStages, "publish", stages.RunStages.evaluate)
    replayer = Replayer(workflows=[Training], plugins=[perdure_plugin()])
    history = read_history(next(path for path in HISTORIES if path.stem == "sequential"))
    result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
    assert result.replay_failure is not None
    assert "TMPRL1100" in str(result.replay_failure)
