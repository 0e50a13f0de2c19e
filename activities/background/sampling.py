"""Sampling and scoring the held-out set on one engine that serves one snapshot. No Ray, no torch.

The same groups, sampler, gate and stop rule as in an evaluation on the run's own engines, so both
kinds of evaluation give the same samples for the same weights and seed.
"""

import math
import time
from collections.abc import Callable, Sequence

from activities.rollout.admission import AdmissionGate
from activities.rollout.attempt import GroupSampler
from activities.rollout.group_loop import run_groups
from activities.rollout.held_out import HeldOutGroups
from activities.rollout.plans import evaluation_plan
from activities.rollout.recovery import Clock, ServingHealth
from activities.verifiers.registry import VerifierSet
from activities.wire.client import EngineClient
from activities.wire.engine_pool import EnginePool
from configs.run import RunSpec
from models.errors import ConfigurationError
from models.prompt import PreparedPrompt
from models.sample import SampleGroup


class HeldOutSampling:
    """One evaluation of one snapshot.

    ``decode`` turns response tokens into text; ``connect`` and ``clock`` are seams for tests.
    """

    def __init__(
        self,
        spec: RunSpec,
        prompts: Sequence[PreparedPrompt],
        verifiers: VerifierSet,
        decode: Callable[[list[int]], str],
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        *,
        connect: Callable[[str], EngineClient] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        def connect_checked(url: str) -> EngineClient:
            return EngineClient(
                url, vocab_size=vocab_size, context_length=spec.core.max_context_length
            )

        if not prompts:
            raise ConfigurationError(
                "there are no held-out prompts to evaluate: set eval_count or eval_prompt_data"
            )
        self._prompts = prompts
        self._samples_per_prompt = spec.evaluation.samples_per_prompt
        self._permits = spec.inference.server_concurrency
        self._pool = EnginePool(connect or connect_checked)
        self._verifiers = verifiers
        self._health = ServingHealth(clock)
        self._sampler = GroupSampler(
            evaluation_plan(spec), self._pool, verifiers, decode, eos_token_ids
        )
        self._groups: HeldOutGroups | None = None

    @property
    def samples_done(self) -> int:
        """Finished samples so far."""
        return self._groups.samples_done if self._groups is not None else 0

    @property
    def samples_total(self) -> int:
        """Samples of the whole evaluation."""
        return len(self._prompts) * self._samples_per_prompt

    async def run(self, url: str, version: int) -> list[SampleGroup]:
        """Every held-out row, sampled and scored under policy ``version``, in row order.

        Raises:
            ServingFailureSustained: the stop rule.
            ContractViolation: the engine or a verifier broke its contract.
        """
        await self._pool.set_engines((url,))
        self._groups = HeldOutGroups(
            self._prompts,
            self._sampler,
            AdmissionGate(self._permits),
            version=version,
            samples_per_prompt=self._samples_per_prompt,
            max_active=2 * math.ceil(self._permits / self._samples_per_prompt),
        )
        await run_groups(self._groups, self._health)
        return self._groups.groups

    async def aclose(self) -> None:
        """Close connections and verifier processes."""
        await self._pool.aclose()
        await self._verifiers.aclose()
