"""One attempt of a prompt group: sample all siblings on one engine, score them, or fail whole."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from activities.rollout.admission import AdmissionGate
from activities.rollout.policy import ServedPolicy
from activities.rollout.recovery import join_siblings
from activities.rollout.segments import ResponseTask, SegmentedResponse
from activities.rollout.siblings import AttemptClock, Put
from activities.verifiers.base import total_reward, truncated
from activities.verifiers.registry import VerifierSet
from activities.wire.contract import SamplingParams
from activities.wire.engine_pool import EnginePool, Route
from models.errors import ConfigurationError
from models.prompt import PreparedPrompt, PromptDraw
from models.sample import FinishReason, Sample, SampleGroup, Verdict


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How a kind of group (training, held out) is sampled. Lengths in tokens, times in seconds."""

    purpose: str
    """Keeps the seeds of different purposes apart: ``train`` or ``eval``."""
    samples_per_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_length: int
    max_context_length: int
    reward_zero_truncated: bool
    seed: int
    request_timeout_s: float
    engine_wait_s: float
    routed_experts: bool = False
    """Ask for the experts that each token was routed to (mixture-of-experts models)."""


def sampling_seed(
    seed: int, purpose: str, sample_index: int, policy_version: int, tokens_so_far: int = 0
) -> int:
    """A seed in [0, 2**31) for one segment of a sample, sent under one policy.

    A retried or resumed sample repeats it, so with an engine that is deterministic in the seed the
    response repeats as well. A segment that goes on after ``tokens_so_far`` response tokens has a
    seed of its own: an engine starts its random numbers anew for each request, so with the first
    segment's seed the second one would repeat the draws of the first.
    """
    text = f"{seed}:{purpose}:{sample_index}:{policy_version}"
    if tokens_so_far:
        text += f":{tokens_so_far}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What the siblings of one attempt share."""

    draw: PromptDraw
    prompt: PreparedPrompt
    gate: AdmissionGate
    route: Route
    policy: ServedPolicy
    exact: int | None
    on_sample: Callable[[], None]
    clock: AttemptClock


class GroupSampler:
    """Makes a ``SampleGroup`` of a draw, or raises; never a part of one.

    ``decode`` turns response tokens (without the end token) into the text that verifiers read.
    ``sibling_rows`` takes the timing row of each attempt; without it groups carry no times.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        pool: EnginePool,
        verifiers: VerifierSet,
        decode: Callable[[list[int]], str],
        eos_token_ids: tuple[int, ...],
        sibling_rows: Put | None = None,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._verifiers = verifiers
        self._decode = decode
        self._eos_token_ids = eos_token_ids
        self._sibling_rows = sibling_rows
        self.finished: dict[int, int] = {}
        """Group index -> samples scored so far, of the groups being attempted."""

    async def attempt(
        self,
        draw: PromptDraw,
        prompt: PreparedPrompt,
        gate: AdmissionGate,
        *,
        policy: ServedPolicy,
        exact: int | None,
        on_sample: Callable[[], None] | None = None,
    ) -> SampleGroup:
        """Sample and score every sibling.

        ``exact`` is the one legal policy version; None allows any up to ``policy.newest``, and
        more than one within a response. ``on_sample`` is called as each sample is generated and
        scored.

        Raises:
            GenerationFault: a known serving fault; siblings were cancelled and joined.
            ContractViolation: an answer breaks the contract, another version included.
        """
        count, wait_s = self._plan.samples_per_prompt, self._plan.engine_wait_s
        report = on_sample or (lambda: None)
        self.finished[draw.group_index] = 0
        try:
            async with self._pool.reserve(count, timeout_s=wait_s) as route:
                with AttemptClock(draw.group_index, self._sibling_rows) as clock:
                    attempt = _Attempt(draw, prompt, gate, route, policy, exact, report, clock)
                    samples = await join_siblings(
                        self._sample(attempt, draw.first_sample_index + sibling)
                        for sibling in range(count)
                    )
        finally:
            del self.finished[draw.group_index]
        return SampleGroup(
            group_index=draw.group_index,
            prepared_sample_id=draw.prepared_sample_id,
            epoch_id=draw.epoch_id,
            samples=samples,
            times=None if self._sibling_rows is None else clock.times(),
        )

    async def _sample(self, attempt: _Attempt, sample_index: int) -> Sample:
        """One sibling. The permit is held until the response is whole, publications included.

        So a response that waits for new weights counts as active: whoever drains the gate waits
        for it as for one that is being generated.
        """
        task = self._task(attempt, sample_index)
        with attempt.clock.sample(sample_index):
            await attempt.gate.acquire()
            try:
                response = await SegmentedResponse(task, attempt.policy).generate(attempt.route)
            finally:
                attempt.gate.release()
        sample = Sample(
            sample_index=sample_index,
            group_index=attempt.draw.group_index,
            prompt_token_ids=list(attempt.prompt.prompt_token_ids),
            response_token_ids=response.token_ids,
            logprobs=response.logprobs,
            spans=response.spans,
            finish_reason=response.finish_reason,
            routed_experts=response.routed_experts,
            prefix_use=response.prefix_use,
        )
        sample.text = self._decode(self._without_end(sample.response_token_ids))
        sample.verdicts = await self._verdicts(attempt.prompt, sample)
        sample.reward = total_reward(sample.verdicts)
        self.finished[attempt.draw.group_index] += 1
        attempt.on_sample()
        return sample

    def _task(self, attempt: _Attempt, sample_index: int) -> ResponseTask:
        plan, prompt = self._plan, attempt.prompt
        room = plan.max_context_length - len(prompt.prompt_token_ids)
        if room < 1:
            raise ConfigurationError(
                f"prompt {prompt.metadata.prepared_sample_id} has {len(prompt.prompt_token_ids)} "
                f"tokens: core.max_context_length {plan.max_context_length} leaves no response"
            )
        return ResponseTask(
            where=f"prompt group {attempt.draw.group_index}, sample {sample_index}",
            prompt_token_ids=prompt.prompt_token_ids,
            sampling=SamplingParams(
                temperature=plan.temperature,
                top_p=plan.top_p,
                top_k=plan.top_k,
                max_new_tokens=min(plan.max_response_length, room),
                stop_token_ids=list(self._eos_token_ids) or None,
            ),
            seed=partial(sampling_seed, plan.seed, plan.purpose, sample_index),
            end_token_ids=self._eos_token_ids,
            exact=attempt.exact,
            routed_experts=plan.routed_experts,
            timeout_s=plan.request_timeout_s,
        )

    async def _verdicts(self, prompt: PreparedPrompt, sample: Sample) -> list[Verdict]:
        cut = sample.finish_reason is FinishReason.LENGTH
        if cut and self._plan.reward_zero_truncated:
            return [truncated(target) for target in prompt.metadata.verifiers]
        return await self._verifiers.score(prompt, sample.text)

    def _without_end(self, token_ids: list[int]) -> list[int]:
        return token_ids[:-1] if token_ids[-1] in self._eos_token_ids else token_ids
