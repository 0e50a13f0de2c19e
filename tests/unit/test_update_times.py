"""What the progress says of an update's time, with a clock of the test's own."""

from typing import Any

import pytest

from models.ids import RunRef
from models.rollout import CollectionCounts, RolloutCollection
from models.run import LoopPlan, RunProgress, RunRequest, RunState
from models.update import UpdateReport
from workflows import options, stages
from workflows.calls import StageCalls
from workflows.stages import RunStages


class Clock:
    """Stands for ``temporalio.workflow``: time passes when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> "Clock":
        return self

    def timestamp(self) -> float:
        return self.seconds

    def set_current_details(self, text: str) -> None:
        """Nobody reads them."""

    async def wait_condition(self, condition: Any) -> None:
        """A pause of an hour."""
        self.seconds += 3600.0


class Calls(StageCalls):
    """Every update takes two seconds, in the trainer."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def start(self, stage: Any, request: Any, *_: Any) -> Any:
        return stage, request

    async def wait(self, call: Any) -> Any:
        stage, request = call
        if stage is options.COLLECT:
            counts = CollectionCounts(groups=1, samples=2, prompt_tokens=2, response_tokens=40)
            return RolloutCollection(
                update=request.update, epoch=1, uri="", sha256="", counts=counts,
                reward_mean=0.5, min_version=0, max_version=0, seconds=0.5,
            )  # fmt: skip
        self._clock.seconds += 2.0
        return UpdateReport(
            update=request.update, policy_version=request.update + 1, optimizer_steps=1,
            batch_sha256="", seconds=2.0, no_signal=False,
        )  # fmt: skip


async def test_a_pause_is_no_part_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the speed, and the time that is said to be left, would be those of an hour's update."""
    clock = Clock()
    monkeypatch.setattr(stages, "workflow", clock)
    progress = RunProgress(
        run=RunRef(run_id="train/a", root="/r", spec_sha256="0" * 64),
        state=RunState.TRAINING,
        plan=LoopPlan(num_rollouts=10, fully_async=True, max_policy_lag=2),
    )
    run = RunStages(RunRequest(config={}, progress=progress), Calls(clock))
    await run.update()
    await run.update()
    assert run.progress.seconds_per_update == pytest.approx(2.0)
    await run.pause()
    await run.update()
    assert run.progress.seconds_per_update == pytest.approx(2.0)
    assert run.progress.tokens_per_second == pytest.approx(20.0)
