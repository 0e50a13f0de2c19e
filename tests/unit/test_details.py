"""The Markdown that the Web UI shows of a run, line by line."""

import pytest

from models.checkpoint import CheckpointRef, Rewind
from models.evaluation import EvaluationReport
from models.ids import RunRef
from models.run import LoopPlan, RunProgress, RunState, StopRequest
from workflows.details import render

CHECKPOINT = CheckpointRef(
    update=3, policy_version=8, folder="checkpoints/core/rollout_0000003.e1u4a1", marker_sha256="a"
)
EVALUATION = EvaluationReport(
    update=4,
    policy_version=8,
    name="reward",
    prompts=3,
    samples=3,
    reward_mean=0.5,
    truncated_fraction=0.0,
    error_fraction=0.0,
    mean_response_tokens=7.0,
    uri="rollouts/eval_0000004.parquet",
    seconds=0.1,
)


def test_everything_that_an_operator_asks_for_is_there() -> None:
    progress = RunProgress(
        run=RunRef(run_id="train/a", root="/runs/a", spec_sha256="0123456789abcdef0123"),
        state=RunState.TRAINING,
        stage="optimize 5",
        plan=LoopPlan(
            num_rollouts=10, tracking="/runs/a/wandb", recipe_name="words", model_name="tiny"
        ),
        next_update=5,
        policy_version=10,
        lag=1,
        reward_recent=(0.25, 0.75),
        checkpoint=CHECKPOINT,
        evaluation=EVALUATION,
        epoch=2,
        rewind=Rewind(epoch=2, updates=4, undone_updates=3, checkpoint=CHECKPOINT, reason="worse"),
        stop=StopRequest(reason="lunch"),
    )
    assert render(progress).splitlines() == [
        "## training: update 5 of 10",
        "",
        "- what: `words`, model `tiny`, run file sha256 `0123456789abcdef`",
        "- now: optimize 5",
        "- mode: sequential",
        "- policy version: 10, lag 1",
        "- reward: 0.750, trend +0.500 over 2 updates",
        "- last checkpoint: after update 4 (`checkpoints/core/rollout_0000003.e1u4a1`)",
        "- last evaluation: 0.500 on 3 prompts after update 4",
        "- epoch 2, recoveries 0, updates redone 0",
        "- rewound: to 4 updates, 3 set aside (worse)",
        "- output: `/runs/a`",
        "- W&B: `/runs/a/wandb`",
        "- report: `/runs/a/report.html`, made by `perdure report`",
        "- stop requested: lunch",
    ]


@pytest.mark.parametrize(("tracking", "shown"), [("", "off"), ("lab/perdure", "`lab/perdure`")])
def test_tracking_elsewhere_or_nowhere(tracking: str, shown: str) -> None:
    progress = RunProgress(
        run=RunRef(run_id="train/a", root="/runs/a", spec_sha256="0"),
        plan=LoopPlan(num_rollouts=1, tracking=tracking),
    )
    assert f"- W&B: {shown}" in render(progress).splitlines()
