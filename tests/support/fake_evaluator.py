"""An evaluator in memory: plays its script instead of sampling."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from activities.storage import layout
from models.background import BackgroundOrder
from models.evaluation import EvaluationReport
from models.ports import StageProgress
from tests.support.fake_engines import Script


class FakeEvaluator:
    """``models.ports.EvaluatorPort``. Its call is named like ``evaluate_snapshot 2``."""

    def __init__(self, script: Script, order: BackgroundOrder) -> None:
        self.script, self.order = script, order

    async def evaluate(self) -> EvaluationReport:
        snapshot = self.order.snapshot
        await self.script.play(f"evaluate_snapshot {snapshot.update}")
        return EvaluationReport(
            update=snapshot.update,
            policy_version=snapshot.policy_version,
            name="heldout",
            prompts=3,
            samples=3,
            reward_mean=0.25 + 0.01 * snapshot.policy_version,
            truncated_fraction=0.0,
            error_fraction=0.0,
            mean_response_tokens=7.0,
            uri=f"{layout.eval_results(self.order.receipt)}/{layout.EVAL_SAMPLES}",
            seconds=0.1,
        )

    async def progress(self) -> StageProgress:
        return StageProgress(stage="evaluate snapshot", done=1, total=3)


class FakeEvaluators:
    """``models.ports.OpenEvaluator`` as ``open``; counts who is open."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.orders: list[BackgroundOrder] = []
        self.num_open = 0

    @asynccontextmanager
    async def open(self, order: BackgroundOrder) -> AsyncIterator[FakeEvaluator]:
        self.orders.append(order)
        self.num_open += 1
        try:
            yield FakeEvaluator(self.script, order)
        finally:
            self.num_open -= 1
