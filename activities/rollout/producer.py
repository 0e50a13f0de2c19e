"""The rollout producer: one collection for each update, and evaluations in between.

    source --draw--> admission gate --> engine pool --> verifiers --> filter --> Parquet, manifest
       ^                                    |
       +------- requeue whole group <-------+  known serving fault

Back-pressure: at most a batch of groups is drawn at a time, and the gate admits
``server_concurrency`` calls per engine. A call of ``collect`` joins the running collection of the
same update, so a retried activity never samples twice.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from activities.fencing import FenceGuard
from activities.rollout.admission import AdmissionGate
from activities.rollout.advantages import group_advantages
from activities.rollout.attempt import GroupSampler, SamplingPlan
from activities.rollout.collection_file import read_collection, write_collection
from activities.rollout.error_log import ErrorLog
from activities.rollout.group_loop import run_groups
from activities.rollout.held_out import HeldOutGroups, evaluation_report
from activities.rollout.recovery import Clock, ServingHealth
from activities.rollout.single_flight import SingleFlight
from activities.rollout.source import PromptSource
from activities.rollout.summary import collection_counts, collection_metrics
from activities.rollout.training_groups import TrainingGroups
from activities.storage.layout import (
    TRAIN_JSONL,
    collection_manifest,
    collection_parquet,
    eval_parquet,
)
from activities.storage.store import Store
from activities.verifiers.registry import VerifierSet
from activities.wire.client import EngineClient
from activities.wire.engine_pool import EnginePool
from configs.run import RunSpec
from models.errors import ConfigurationError
from models.evaluation import EvaluateRequest, EvaluationReport
from models.ids import FenceToken, RunRef
from models.ports import StageProgress
from models.prompt import DataState, PreparedPrompt
from models.rollout import CollectionManifest, CollectRequest, RolloutCollection

DRAIN_MARGIN_S = 30.0
"""Added to the request deadline when admitted calls must finish before an evaluation."""


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

        self._spec = spec
        self._store = store
        self._run = run
        self._held_out = held_out
        self._verifiers = verifiers
        self._source = PromptSource(
            train,
            seed=spec.data.seed,
            shuffle=spec.data.shuffle,
            samples_per_prompt=spec.training.samples_per_prompt,
            train_sha256=store.sha256(TRAIN_JSONL),
            state=state,
        )
        self._pool = EnginePool(connect or connect_checked)
        self._train_sampler, self._eval_sampler = (
            GroupSampler(plan, self._pool, verifiers, decode, eos_token_ids)
            for plan in (training_plan(spec), evaluation_plan(spec))
        )
        self._train_gate = AdmissionGate(spec.inference.server_concurrency)
        self._eval_gate = AdmissionGate(spec.inference.server_concurrency)
        self._health = ServingHealth(clock)
        self._errors = ErrorLog(store, self._health)
        self._epochs = FenceGuard("producer")
        # Stages of different updates overlap, so each kind of stage orders its own tokens; only
        # the epoch is common to all.
        self._collect = SingleFlight[RolloutCollection]("collect")
        self._evaluate = SingleFlight[EvaluationReport]("evaluate")
        self._collecting: tuple[int, TrainingGroups] | None = None
        self._evaluating: tuple[int, HeldOutGroups] | None = None

    async def collect(self, token: FenceToken, request: CollectRequest) -> RolloutCollection:
        """Commit the collection of ``request.update``; the same update again returns the same.

        Raises:
            StaleFence: ``token`` is outranked or its epoch was revoked.
            ServingFailureSustained: the stop rule.
            ServiceUnreachable: there was no engine within the start and update deadlines.
            ContractViolation: an engine or a verifier broke its contract.
        """
        self._admit_epoch(token)
        return await self._collect.run(
            token, (request.update,), lambda: self._run_collection(request)
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
            lambda: self._run_evaluation(request),
        )

    async def data_state(self, consumed_through: int) -> DataState:
        """Cursor and ledger under one lock, collections up to the index counted as consumed."""
        return self._source.snapshot(consumed_through)

    async def set_engines(self, token: FenceToken, urls: tuple[str, ...]) -> None:
        """Route to exactly these engines; live calls to others fail and their groups requeue.

        Ordered by epoch alone: stages of different updates may both replace an engine.
        """
        self._admit_epoch(token)
        permits = self._spec.inference.server_concurrency * max(1, len(urls))
        self._train_gate.resize(permits)
        self._eval_gate.resize(permits)
        await self._pool.set_engines(urls)

    async def progress(self) -> StageProgress:
        """Samples done of the stage that runs now, an evaluation before a collection."""
        training, evaluation = self._spec.training, self._spec.evaluation
        if self._evaluating is not None:
            update, held_out = self._evaluating
            total = len(self._held_out) * evaluation.samples_per_prompt
            return StageProgress(
                stage=f"evaluate {update}", done=held_out.samples_done, total=total
            )
        if self._collecting is not None:
            update, groups = self._collecting
            total = training.rollout_batch_size * training.samples_per_prompt
            dropped = sum(groups.tally.dropped.values())
            return StageProgress(
                stage=f"collect {update}",
                done=groups.samples_done,
                total=total,
                detail=f"{dropped} groups filtered" if dropped else "",
            )
        return StageProgress(stage="idle")

    def revoke(self, epoch: int) -> None:
        """Refuse ``epoch`` and below from now on and end their stages; prompts are given back."""
        self._epochs.revoke(epoch)
        self._collect.revoke(epoch)
        self._evaluate.revoke(epoch)

    async def close(self) -> None:
        """End every stage, engine connection and verifier process."""
        await self._collect.aclose()
        await self._evaluate.aclose()
        await self._errors.aclose()
        await self._pool.aclose()
        await self._verifiers.aclose()

    def _admit_epoch(self, token: FenceToken) -> None:
        self._epochs.admit(FenceToken(epoch=token.epoch, update=0, attempt=0))

    @property
    def _engine_wait_s(self) -> float:
        return engine_wait_s(self._spec)

    async def _run_collection(self, request: CollectRequest) -> RolloutCollection:
        """Adopt the committed collection of this update and epoch, or sample and commit it."""
        self._source.forget(request.consumed_through)
        manifest = await asyncio.to_thread(self._committed, request)
        if manifest is not None:
            return await self._adopt(request.update, manifest)
        async with self._errors.watch():
            self._source.give_back_from(request.update)
            training = self._spec.training
            groups = TrainingGroups(
                self._source,
                self._train_sampler,
                self._train_gate,
                version=request.policy_version,
                batch_size=training.rollout_batch_size,
                filter_zero_std=self._spec.core.filter_zero_std_groups
                and training.samples_per_prompt > 1,
            )
            self._collecting = (request.update, groups)
            committed = False
            try:
                await self._pool.wait_ready(self._engine_wait_s)
                started = time.monotonic()
                await run_groups(groups, self._health)
                collection = await self._commit(request, groups, started)
                committed = True
            finally:
                self._collecting = None
                if not committed:
                    groups.give_back()
            return collection

    async def _commit(
        self, request: CollectRequest, work: TrainingGroups, started: float
    ) -> RolloutCollection:
        """Parquet first, manifest last: without a manifest the collection does not exist."""
        groups = work.kept
        for group in groups:
            group.advantages = group_advantages(
                group.rewards, self._spec.training.grpo_std_normalization
            )
        dropped = work.dropped
        consumed = [group.group_index for group in groups]
        consumed += [each.draw.group_index for each in dropped]
        self._source.assign(request.update, consumed)
        data_after = self._source.snapshot(request.update)
        uri = collection_parquet(request.update, request.epoch)
        sha256 = await asyncio.to_thread(write_collection, self._store, uri, groups)
        seconds = time.monotonic() - started
        counts = collection_counts(groups, work.tally)
        metrics = collection_metrics(
            request.update, groups, counts, work.tally, work.max_requeues, seconds
        )
        collection = RolloutCollection(
            update=request.update,
            epoch=request.epoch,
            uri=uri,
            sha256=sha256,
            counts=counts,
            reward_mean=work.tally.reward_mean,
            min_version=int(metrics["rollout/weight_version/min"]),
            max_version=int(metrics["rollout/weight_version/max"]),
            seconds=seconds,
            metrics=metrics,
        )
        manifest = CollectionManifest(
            collection=collection, data_after=data_after, dropped=tuple(dropped)
        )
        self._epochs.admit(FenceToken(epoch=request.epoch, update=0, attempt=0))
        await asyncio.to_thread(
            self._store.write_json,
            collection_manifest(request.update, request.epoch),
            manifest.model_dump(mode="json"),
        )
        return collection

    def _committed(self, request: CollectRequest) -> CollectionManifest | None:
        rel = collection_manifest(request.update, request.epoch)
        if not self._store.exists(rel):
            return None
        return CollectionManifest.model_validate(self._store.read_json(rel))

    async def _adopt(self, update: int, manifest: CollectionManifest) -> RolloutCollection:
        """Take over a collection that an earlier life of this producer committed."""
        groups = await asyncio.to_thread(read_collection, self._store, manifest.collection)
        dropped = [each.draw for each in manifest.dropped]
        self._source.adopt(update, groups, manifest.data_after, dropped)
        return manifest.collection

    async def _run_evaluation(self, request: EvaluateRequest) -> EvaluationReport:
        if not self._held_out:
            raise ConfigurationError(
                "there are no held-out prompts to evaluate: set eval_count or eval_prompt_data"
            )
        samples_per_prompt = self._spec.evaluation.samples_per_prompt
        async with self._errors.watch():
            groups = HeldOutGroups(
                self._held_out,
                self._eval_sampler,
                self._eval_gate,
                version=request.policy_version,
                samples_per_prompt=samples_per_prompt,
                max_active=2 * math.ceil(self._eval_gate.permits / samples_per_prompt),
            )
            self._evaluating = (request.update, groups)
            self._train_gate.pause()
            try:
                drain_s = self._spec.inference.request_timeout_s + DRAIN_MARGIN_S
                await self._train_gate.wait_idle(drain_s)
                await self._pool.wait_ready(self._engine_wait_s)
                started = time.monotonic()
                await run_groups(groups, self._health)
            finally:
                self._train_gate.resume()
                self._evaluating = None
            uri = eval_parquet(request.update, request.epoch)
            report = evaluation_report(request, groups.groups, uri, time.monotonic() - started)
            self._epochs.admit(FenceToken(epoch=request.epoch, update=0, attempt=0))
            await asyncio.to_thread(write_collection, self._store, uri, groups.groups)
            return report


def engine_wait_s(spec: RunSpec) -> float:
    """How long a stage waits for engines: one may be starting and loading weights."""
    return spec.inference.start_timeout_s + spec.inference.update_timeout_s


def training_plan(spec: RunSpec) -> SamplingPlan:
    """How training groups are sampled."""
    inference = spec.inference
    return SamplingPlan(
        purpose="train",
        samples_per_prompt=spec.training.samples_per_prompt,
        temperature=inference.temperature,
        top_p=inference.top_p,
        top_k=inference.top_k,
        max_response_length=inference.max_response_length,
        max_context_length=spec.core.max_context_length,
        reward_zero_truncated=spec.core.reward_zero_truncated,
        seed=spec.data.seed,
        request_timeout_s=inference.request_timeout_s,
        engine_wait_s=engine_wait_s(spec),
    )


def evaluation_plan(spec: RunSpec) -> SamplingPlan:
    """How held-out groups are sampled: their own temperature and length, no truncation rule."""
    evaluation, inference = spec.evaluation, spec.inference
    return SamplingPlan(
        purpose="eval",
        samples_per_prompt=evaluation.samples_per_prompt,
        temperature=evaluation.temperature,
        top_p=1.0,
        top_k=-1,
        max_response_length=evaluation.max_response_length or inference.max_response_length,
        max_context_length=spec.core.max_context_length,
        reward_zero_truncated=False,
        seed=spec.data.seed,
        request_timeout_s=inference.request_timeout_s,
        engine_wait_s=engine_wait_s(spec),
    )
