"""The rollout producer: collections for the trainer, evaluations in between.

    source --draw--> admission gate --> engine pool --> verifiers --> filter --> Parquet, manifest
       ^                                    |
       +------- requeue whole group <-------+  known serving fault

A call of ``collect`` joins the running collection of the same update, so a retried activity never
samples twice. How groups come about is ``SequentialRollouts`` or ``FreeRollouts``.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from activities.fencing import FenceGuard
from activities.rollout.admission import AdmissionGate
from activities.rollout.attempt import GroupSampler, SamplingPlan
from activities.rollout.committing import CollectionWriter
from activities.rollout.error_log import ErrorLog
from activities.rollout.evaluating import SharedEvaluation
from activities.rollout.free_rollouts import FreeRollouts
from activities.rollout.parts import ProducerParts
from activities.rollout.plans import evaluation_plan, training_plan
from activities.rollout.recovery import Clock, ServingHealth
from activities.rollout.sequential import SequentialRollouts
from activities.rollout.siblings import Put
from activities.rollout.single_flight import SingleFlight
from activities.rollout.source import PromptSource
from activities.storage.layout import TRAIN_JSONL
from activities.storage.store import Store
from activities.verifiers.registry import VerifierSet
from activities.wire.client import EngineClient
from activities.wire.engine_pool import EnginePool
from configs.run import RunSpec
from models.errors import ContractViolation
from models.evaluation import EvaluateRequest, EvaluationReport
from models.ids import FenceToken, RunRef
from models.ports import ServingReport, StageProgress
from models.prompt import DataState, PreparedPrompt
from models.rollout import CollectRequest, RolloutCollection


class RolloutProducer:
    """Implements ``models.ports.ProducerPort`` in one event loop; no call blocks it.

    ``state`` is where the data position starts: empty for a new run, a checkpoint's cursor or a
    manifest's ``data_after`` otherwise. ``decode`` turns response tokens into text. ``connect``
    and ``clock`` (monotonic seconds of the stop rule) are seams for tests.
    """

    def __init__(
        self,
        spec: RunSpec,
        store: Store,
        run: RunRef,
        train: Sequence[PreparedPrompt],
        held_out: Sequence[PreparedPrompt],
        verifiers: VerifierSet,
        decode: Callable[[list[int]], str],
        state: DataState,
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

        def sampler(plan: SamplingPlan, sibling_rows: Put | None = None) -> GroupSampler:
            return GroupSampler(plan, pool, verifiers, decode, eos_token_ids, sibling_rows)

        pool = EnginePool(connect or connect_checked, routed=spec.fully_async)
        self._spec = spec
        self._run = run
        self._verifiers = verifiers
        self._parts = parts = _parts(spec, store, train, state, pool, clock)
        # Stages of different updates overlap, so each kind of stage orders its own tokens; only
        # the epoch is common to all.
        self._collect = SingleFlight[RolloutCollection]("collect")
        self._evaluate = SingleFlight[EvaluationReport]("evaluate")
        self._publications = FenceGuard("publication")
        self._epoch = -1
        self._free: FreeRollouts | None = None
        if spec.fully_async:
            self._free = FreeRollouts(
                parts, lambda put: sampler(training_plan(spec), put), lambda: self._evaluation.gate
            )
        self._training = self._free or SequentialRollouts(parts, sampler(training_plan(spec)))
        self._evaluation = SharedEvaluation(
            parts, held_out, sampler(evaluation_plan(spec)), self._training
        )

    async def collect(self, token: FenceToken, request: CollectRequest) -> RolloutCollection:
        """Commit the collection of ``request.update``; the same update again returns the same.

        Raises:
            StaleFence: ``token`` is outranked or its epoch was revoked.
            ServingFailureSustained: the stop rule.
            ServiceUnreachable: there was no engine within the start and update deadlines.
            ContractViolation: an engine or a verifier broke its contract.
        """
        self._admit_epoch(token)
        if not self._evaluation.is_running:
            self._training.reopen()  # a failed evaluation left it closed
        return await self._collect.run(
            token, (request.update,), lambda: self._training.collect(request)
        )

    async def evaluate(self, token: FenceToken, request: EvaluateRequest) -> EvaluationReport:
        """Sample and score every held-out prompt under one policy version.

        Training calls that are admitted finish first; the others wait until the end. Raises what
        ``collect`` raises.
        """
        self._admit_epoch(token)
        return await self._evaluate.run(
            token,
            (request.update, request.policy_version, request.phase),
            lambda: self._evaluation.evaluate(request),
        )

    async def data_state(self, consumed_through: int) -> DataState:
        """Cursor and ledger under one lock, collections up to the index counted as consumed."""
        return self._parts.source.snapshot(consumed_through)

    async def set_engines(
        self, token: FenceToken, urls: tuple[str, ...], *, healed: bool = False
    ) -> None:
        """Route to exactly these engines; live calls to others fail and their groups requeue.

        In a fully async run the one address is the router's. Ordered by epoch alone: stages of
        different updates may both replace an engine. ``healed``: see ``ProducerPort``.
        """
        self._admit_epoch(token)
        inference = self._spec.inference
        engines = inference.num_engines if self._spec.fully_async else max(1, len(urls))
        permits = inference.server_concurrency * engines
        self._parts.gate.resize(permits)
        self._evaluation.resize(permits)
        await self._parts.pool.set_engines(urls)
        if healed and self._free is not None:
            self._free.healed()

    async def begin_publication(self, token: FenceToken, version: int) -> None:
        """See ``ProducerPort.begin_publication``.

        Raises:
            StaleFence: ``token`` is outranked or its epoch was revoked.
            ContractViolation: ``version`` is older than what is published.
            ServiceUnreachable: cancelled groups do not end.
        """
        await self._admit_publication(token).boundary.begin(version)

    async def end_publication(self, token: FenceToken, version: int) -> None:
        """See ``ProducerPort.end_publication``.

        Raises:
            StaleFence: ``token`` is outranked or its epoch was revoked.
            ContractViolation: another version was begun last.
        """
        await self._admit_publication(token).boundary.end(version)

    async def reports(self, after: int) -> tuple[ServingReport, ...]:
        """The ``errors/`` reports numbered above ``after``, at most the newest few hundred."""
        return self._parts.errors.reports(after)

    async def progress(self) -> StageProgress:
        """Samples done of the stage that runs now, an evaluation before a collection."""
        running = self._evaluation.progress() or self._training.progress()
        return running or StageProgress(stage="idle")

    def snapshot(self) -> dict[str, Any]:
        """What a fully async producer holds now: a row of ``pipeline_occupancy.jsonl``."""
        return self._require_free().snapshot()

    def revoke(self, epoch: int) -> None:
        """Refuse ``epoch`` and below from now on and end their stages; prompts are given back."""
        self._parts.epochs.revoke(epoch)
        self._collect.revoke(epoch)
        self._evaluate.revoke(epoch)
        if self._free is not None:
            self._free.revoke(epoch)

    async def close(self) -> None:
        """End every stage, engine connection and verifier process."""
        await self._collect.aclose()
        await self._evaluate.aclose()
        if self._free is not None:
            await self._free.aclose()
        await self._parts.errors.aclose()
        await self._parts.pool.aclose()
        await self._verifiers.aclose()

    def _admit_epoch(self, token: FenceToken) -> None:
        self._parts.epochs.admit(FenceToken(epoch=token.epoch, update=0, attempt=0))
        if token.epoch > self._epoch:
            self._epoch = token.epoch
            self._parts.health.start_over()
            if self._free is not None:
                self._free.enter_epoch(token.epoch)

    def _admit_publication(self, token: FenceToken) -> FreeRollouts:
        free = self._require_free()
        self._admit_epoch(token)
        self._publications.admit(token)
        return free

    def _require_free(self) -> FreeRollouts:
        if self._free is None:
            raise ContractViolation(
                f"the producer of {self._run.run_id} is sequential: it is asked for collections "
                "and knows no publications (async.fully_async is false)"
            )
        return self._free


def _parts(
    spec: RunSpec,
    store: Store,
    train: Sequence[PreparedPrompt],
    state: DataState,
    pool: EnginePool,
    clock: Clock,
) -> ProducerParts:
    source = PromptSource(
        train,
        seed=spec.data.seed,
        shuffle=spec.data.shuffle,
        samples_per_prompt=spec.training.samples_per_prompt,
        train_sha256=store.sha256(TRAIN_JSONL),
        state=state,
    )
    health = ServingHealth(clock)
    epochs = FenceGuard("producer")
    return ProducerParts(
        spec=spec,
        store=store,
        source=source,
        pool=pool,
        gate=AdmissionGate(spec.inference.server_concurrency),
        health=health,
        errors=ErrorLog(store, health),
        epochs=epochs,
        writer=CollectionWriter(spec, store, source, epochs),
    )
