"""One attempt of a prompt group: sample all siblings on one engine, score them, or fail whole."""

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from activities.rollout.admission import AdmissionGate
from activities.rollout.policy import ServedPolicy
from activities.rollout.recovery import join_siblings
from activities.verifiers.base import total_reward, truncated
from activities.verifiers.registry import VerifierSet
from activities.wire.contract import GenerateRequest, GenerateResponse, SamplingParams
from activities.wire.engine_pool import EnginePool, Route
from models.errors import ConfigurationError, ContractViolation
from models.prompt import PreparedPrompt, PromptDraw
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan, Verdict


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


def sampling_seed(seed: int, purpose: str, sample_index: int, policy_version: int) -> int:
    """A seed in [0, 2**31) for one sample under one policy.

    A retried or resumed sample repeats it, so with an engine that is deterministic in the seed the
    response repeats as well.
    """
    text = f"{seed}:{purpose}:{sample_index}:{policy_version}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


class GroupSampler:
    """Makes a ``SampleGroup`` of a draw, or raises; never a part of one.

    ``decode`` turns response tokens (without the end token) into the text that verifiers read.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        pool: EnginePool,
        verifiers: VerifierSet,
        decode: Callable[[list[int]], str],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._verifiers = verifiers
        self._decode = decode
        self._eos_token_ids = eos_token_ids
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

        ``exact`` is the one legal policy version; None allows any up to ``policy.newest``.
        ``on_sample`` is called as each sample is generated and scored.

        Raises:
            GenerationFault: a known serving fault; siblings were cancelled and joined.
            ContractViolation: an answer breaks the contract, another version included.
        """
        plan = self._plan
        self.finished[draw.group_index] = 0
        try:
            async with self._pool.reserve(
                plan.samples_per_prompt, timeout_s=plan.engine_wait_s
            ) as route:
                samples = await join_siblings(
                    self._sample(draw, prompt, sibling, gate, route, policy, exact, on_sample)
                    for sibling in range(plan.samples_per_prompt)
                )
        finally:
            del self.finished[draw.group_index]
        return SampleGroup(
            group_index=draw.group_index,
            prepared_sample_id=draw.prepared_sample_id,
            epoch_id=draw.epoch_id,
            samples=samples,
        )

    async def _sample(
        self,
        draw: PromptDraw,
        prompt: PreparedPrompt,
        sibling: int,
        gate: AdmissionGate,
        route: Route,
        policy: ServedPolicy,
        exact: int | None,
        on_sample: Callable[[], None] | None,
    ) -> Sample:
        version = policy.published if exact is None else exact
        index = draw.first_sample_index + sibling
        request = self._request(prompt, index, version)
        await gate.acquire()
        try:
            answer = await route.generate(request, timeout_s=self._plan.request_timeout_s)
        finally:
            gate.release()
        sample = self._read(answer, draw, prompt, index, version, request.rid)
        sample.text = self._decode(self._without_end(sample.response_token_ids))
        sample.verdicts = await self._verdicts(prompt, sample)
        sample.reward = total_reward(sample.verdicts)
        self.finished[draw.group_index] += 1
        if on_sample is not None:
            on_sample()
        return sample

    def _request(self, prompt: PreparedPrompt, sample_index: int, version: int) -> GenerateRequest:
        plan = self._plan
        room = plan.max_context_length - len(prompt.prompt_token_ids)
        if room < 1:
            raise ConfigurationError(
                f"prompt {prompt.metadata.prepared_sample_id} has {len(prompt.prompt_token_ids)} "
                f"tokens: core.max_context_length {plan.max_context_length} leaves no response"
            )
        return GenerateRequest(
            rid=uuid.uuid4().hex,
            input_ids=list(prompt.prompt_token_ids),
            sampling_params=SamplingParams(
                temperature=plan.temperature,
                top_p=plan.top_p,
                top_k=plan.top_k,
                max_new_tokens=min(plan.max_response_length, room),
                stop_token_ids=list(self._eos_token_ids) or None,
                sampling_seed=sampling_seed(plan.seed, plan.purpose, sample_index, version),
            ),
        )

    def _read(
        self,
        answer: GenerateResponse,
        draw: PromptDraw,
        prompt: PreparedPrompt,
        sample_index: int,
        version: int,
        rid: str,
    ) -> Sample:
        """The answer as a sample without text and reward; a partial response is refused."""
        meta = answer.meta_info
        reason = FinishReason(meta.finish_reason["type"])
        where = f"prompt group {draw.group_index}, request {rid}"
        if reason is FinishReason.ABORT:
            raise ContractViolation(f"{where}: finish_reason is abort: {meta.finish_reason}")
        if answer.output_ids[-1] in self._eos_token_ids:
            # An engine says "length" of an end token in the last allowed place; nothing was cut.
            reason = FinishReason.STOP
        if meta.weight_version != str(version):
            raise ContractViolation(
                f"{where}: weight_version is {meta.weight_version!r}, expected {version}: the "
                "engine serves other weights than were published"
            )
        entries = meta.output_token_logprobs or []
        return Sample(
            sample_index=sample_index,
            group_index=draw.group_index,
            prompt_token_ids=list(prompt.prompt_token_ids),
            response_token_ids=answer.output_ids,
            logprobs=[entry[0] for entry in entries],
            spans=[TokenSpan(version, 0, len(answer.output_ids))],
            finish_reason=reason,
        )

    async def _verdicts(self, prompt: PreparedPrompt, sample: Sample) -> list[Verdict]:
        cut = sample.finish_reason is FinishReason.LENGTH
        if cut and self._plan.reward_zero_truncated:
            return [truncated(target) for target in prompt.metadata.verifiers]
        return await self._verifiers.score(prompt, sample.text)

    def _without_end(self, token_ids: list[int]) -> list[int]:
        return token_ids[:-1] if token_ids[-1] in self._eos_token_ids else token_ids
