"""Evaluation on the run's own engines: training calls wait meanwhile, and nothing of it is lost."""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Protocol

from activities.rollout.admission import AdmissionGate
from activities.rollout.attempt import GroupSampler
from activities.rollout.collection_file import write_collection
from activities.rollout.group_loop import run_groups
from activities.rollout.held_out import HeldOutGroups, evaluation_report
from activities.rollout.in_flight import JOIN_S
from activities.rollout.parts import ProducerParts
from activities.rollout.plans import engine_wait_s
from activities.storage.layout import eval_parquet
from models.errors import ConfigurationError
from models.evaluation import EvaluateRequest, EvaluationReport
from models.ids import FenceToken
from models.ports import StageProgress
from models.prompt import PreparedPrompt


class TrainingCalls(Protocol):
    """The side of the producer that makes way for an evaluation."""

    async def quiet(self, timeout_s: float) -> None:
        """Admit no call; return when the engines owe none."""
        ...

    def reopen(self) -> None:
        """Admit calls again."""
        ...


class SharedEvaluation:
    """Evaluates with an admission gate and a sampler of its own.

    A failed evaluation leaves training calls closed out: the run ends on it, or a retry or the next
    collection opens again.
    """

    def __init__(
        self,
        parts: ProducerParts,
        held_out: Sequence[PreparedPrompt],
        sampler: GroupSampler,
        training: TrainingCalls,
    ) -> None:
        self._parts = parts
        self._spec = spec = parts.spec
        self._held_out = held_out
        self._sampler = sampler
        self._training = training
        self._permits = spec.inference.server_concurrency
        self._running: tuple[int, HeldOutGroups] | None = None
        self.gate = AdmissionGate(self._permits)
        """Of the last evaluation."""

    @property
    def is_running(self) -> bool:
        """Whether training calls wait for an evaluation."""
        return self._running is not None

    def resize(self, permits: int) -> None:
        """Change how many calls run at once."""
        self._permits = permits
        self.gate.resize(permits)

    async def evaluate(self, request: EvaluateRequest) -> EvaluationReport:
        """Sample and score every held-out prompt under one version, and write the samples.

        Raises:
            ServiceUnreachable: training calls did not end within ``inference.drain_timeout_s``.
            ConfigurationError: there are no held-out prompts.
            PerdureError: what ended the evaluation.
        """
        if not self._held_out:
            raise ConfigurationError(
                "there are no held-out prompts to evaluate: set eval_count or eval_prompt_data"
            )
        self.gate = gate = AdmissionGate(self._permits)
        groups = HeldOutGroups(
            self._held_out,
            self._sampler,
            gate,
            version=request.policy_version,
            samples_per_prompt=self._spec.evaluation.samples_per_prompt,
            max_active=2 * math.ceil(self._permits / self._spec.evaluation.samples_per_prompt),
        )
        self._running = (request.update, groups)
        done = False
        try:
            async with self._parts.errors.watch():
                report = await self._sample(request, groups)
            done = True
        finally:
            self._running = None
            if done:
                self._training.reopen()
            else:
                await gate.abort(JOIN_S)
        return report

    def progress(self) -> StageProgress | None:
        """Samples done of the evaluation that runs; None without one."""
        if self._running is None:
            return None
        update, groups = self._running
        total = len(self._held_out) * self._spec.evaluation.samples_per_prompt
        return StageProgress(stage=f"evaluate {update}", done=groups.samples_done, total=total)

    async def _sample(self, request: EvaluateRequest, groups: HeldOutGroups) -> EvaluationReport:
        await self._training.quiet(self._spec.inference.drain_timeout_s)
        await self._parts.pool.wait_ready(engine_wait_s(self._spec))
        started = time.monotonic()
        await run_groups(groups, self._parts.health)
        uri = eval_parquet(request.update, request.epoch)
        report = evaluation_report(request, groups.groups, uri, time.monotonic() - started)
        self._parts.epochs.admit(FenceToken(epoch=request.epoch, update=0, attempt=0))
        sha256 = await asyncio.to_thread(write_collection, self._parts.store, uri, groups.groups)
        return report.model_copy(update={"sha256": sha256})
