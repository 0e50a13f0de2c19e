"""Evaluation: every held-out prompt, every sample, one policy version. N rows in, N rows out."""

import math
from collections import deque
from collections.abc import Sequence

from activities.rollout.admission import AdmissionGate
from activities.rollout.attempt import GroupSampler
from activities.rollout.policy import ServedPolicy
from activities.rollout.summary import count_verdicts, is_truncated
from models.errors import ContractViolation, GenerationFault
from models.evaluation import EvaluateRequest, EvaluationReport
from models.metrics import refuse_undeclared
from models.prompt import PreparedPrompt, PromptDraw
from models.sample import SampleGroup, VerdictOutcome

EVAL_NAME = "heldout"


class HeldOutGroups:
    """``GroupWork`` of an evaluation. Nothing is filtered; a failed group is sampled again."""

    def __init__(
        self,
        prompts: Sequence[PreparedPrompt],
        sampler: GroupSampler,
        gate: AdmissionGate,
        *,
        version: int,
        samples_per_prompt: int,
        max_active: int,
    ) -> None:
        self._prompts = prompts
        self._sampler = sampler
        self._gate = gate
        self._version = version
        self._max_active = max_active
        self._waiting = deque(
            PromptDraw(
                group_index=row,
                first_sample_index=row * samples_per_prompt,
                epoch_id=0,
                row=row,
                prepared_sample_id=prompt.metadata.prepared_sample_id,
            )
            for row, prompt in enumerate(prompts)
        )
        self._groups: dict[int, SampleGroup] = {}

    @property
    def groups(self) -> list[SampleGroup]:
        """Finished groups, in row order."""
        return [self._groups[row] for row in sorted(self._groups)]

    @property
    def samples_done(self) -> int:
        """Finished samples, those of running attempts included."""
        finished = sum(len(group.samples) for group in self._groups.values())
        return finished + sum(self._sampler.finished.values())

    def next_draws(self, num_active: int) -> list[PromptDraw]:
        """Rows not sampled yet, as many as keep the engines busy."""
        room = max(0, self._max_active - num_active)
        return [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]

    async def attempt(self, draw: PromptDraw) -> SampleGroup:
        """Sample and score the row."""
        return await self._sampler.attempt(
            draw,
            self._prompts[draw.row],
            self._gate,
            policy=ServedPolicy(self._version),
            exact=self._version,
        )

    def on_finished(self, draw: PromptDraw, group: SampleGroup) -> None:
        """Keep the group."""
        self._groups[draw.row] = group

    def on_fault(self, draw: PromptDraw, fault: GenerationFault) -> None:
        """The row is next in line again."""
        self._waiting.appendleft(draw)

    def is_complete(self) -> bool:
        """Whether every row is sampled."""
        return len(self._groups) == len(self._prompts)


def evaluation_report(
    request: EvaluateRequest, groups: Sequence[SampleGroup], uri: str, seconds: float
) -> EvaluationReport:
    """The report on finished groups.

    Raises:
        ContractViolation: samples of more than one policy version, or none with a score.
    """
    samples = [sample for group in groups for sample in group.samples]
    versions = {span.version for sample in samples for span in sample.spans}
    if versions != {request.policy_version}:
        raise ContractViolation(
            f"evaluation after update {request.update} sampled versions {sorted(versions)}, "
            f"expected {request.policy_version} alone"
        )
    rewards = [sample.reward for sample in samples if math.isfinite(sample.reward)]
    if not rewards:
        details = [verdict.detail for verdict in samples[0].verdicts]
        raise ContractViolation(f"no held-out sample could be scored; the first one: {details}")
    reward_mean = math.fsum(rewards) / len(rewards)
    truncated_fraction = sum(map(is_truncated, samples)) / len(samples)
    error_fraction = 1 - len(rewards) / len(samples)
    mean_tokens = sum(len(sample.response_token_ids) for sample in samples) / len(samples)
    invalid = count_verdicts(samples, VerdictOutcome.INVALID)
    metrics = {
        "eval/step": request.update,
        f"eval/{EVAL_NAME}": reward_mean,
        f"eval/{EVAL_NAME}-truncated_ratio": truncated_fraction,
        f"eval/{EVAL_NAME}-none_reward_ratio": error_fraction,
        f"eval/{EVAL_NAME}/invalid_fraction": invalid / len(samples),
        f"eval/{EVAL_NAME}/response_len/mean": mean_tokens,
    }
    refuse_undeclared(metrics)
    return EvaluationReport(
        update=request.update,
        policy_version=request.policy_version,
        name=EVAL_NAME,
        prompts=len(groups),
        samples=len(samples),
        reward_mean=reward_mean,
        truncated_fraction=truncated_fraction,
        error_fraction=error_fraction,
        mean_response_tokens=mean_tokens,
        uri=uri,
        seconds=seconds,
        metrics=metrics,
    )
