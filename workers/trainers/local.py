"""The trainer in one process: a model, AdamW in float32, one update at a time.

One update: validate the collection -> deal samples to optimizer steps -> a scoring pass where the
run needs one, log-probs of the reference -> for each step: packed forward and backward, checks,
clip, AdamW. An update of one step needs no scoring pass: the log-probs of its own forward are the
old log-probs, so its ratios are exactly 1.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from activities.storage.store import Store
from configs.run import RunSpec
from models.checkpoint import CheckpointFile, PolicyClock
from models.errors import ContractViolation, NonFiniteLoss, TrainerLost
from models.evaluation import ExportReport
from models.metrics import refuse_undeclared
from models.ports import StageProgress
from models.publication import WeightsRef
from models.sample import SampleGroup
from models.update import UpdateReport
from workers.trainers.batch import StepPlan, TrainingBatch, accepted, plan_steps, update_seed
from workers.trainers.contract_file import ContractFile
from workers.trainers.device_memory import PeakMemory, resident_bytes
from workers.trainers.export import ExportProbe, export_hf
from workers.trainers.host_copy import WeightsCopy
from workers.trainers.load import describe_trainer, load_policy, scorer_of
from workers.trainers.logprobs import Scorer
from workers.trainers.normalization import Normalization
from workers.trainers.optimizer_step import OptimizerStep
from workers.trainers.parameter_probe import ParameterProbe
from workers.trainers.ranks import Ranks, SingleRank, agreed
from workers.trainers.reference import load_reference
from workers.trainers.replay_check import Phase
from workers.trainers.routing import Routing
from workers.trainers.routing_events import record_load, record_replay
from workers.trainers.row_layout import RowLayout
from workers.trainers.schedule import LearningRate
from workers.trainers.sending import WeightSender
from workers.trainers.sharded import shard, stays_gathered
from workers.trainers.state import TrainerState, read_state, write_state
from workers.trainers.step_event import OPTIMIZER, PACKING, optimizer_event, packing_event
from workers.trainers.step_loss import StepLoss, UpdateTokens
from workers.trainers.tally import UpdateTally, advantage_metrics, clock_metrics, rate_metrics
from workers.trainers.update_scores import Judge, StepWork, UpdateScores, record_refresh
from workers.trainers.weights import export_weights

_log = structlog.get_logger(__name__)


class LocalTrainer:
    """Owns the policy's weights. Not thread-safe: ``GuardedTrainer`` serializes the calls.

    Without ``trainer.num_threads`` torch keeps what its process's environment gave it.
    """

    def __init__(
        self,
        spec: RunSpec,
        model_dir: Path,
        contract: ContractFile | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the model.

        Args:
            spec: the run.
            model_dir: the prepared model.
            contract: where events go; default: below ``output.root``.
            ranks: who trains as well; default: nobody.
        """
        if spec.trainer.num_threads is not None:
            torch.set_num_threads(spec.trainer.num_threads)
        self.spec = spec
        self.model_dir = model_dir
        self.ranks = ranks or SingleRank()
        self.next_update = 0
        self.policy_version = 0
        self.last_report: UpdateReport | None = None
        self._published_step = -1
        self._progress = StageProgress(stage="idle")
        self._steps_into_update = 0
        self._dtype = getattr(torch, spec.trainer.compute_dtype)
        self._schedule = LearningRate.of(spec)
        self.model: Any = load_policy(spec, model_dir)
        self._memory = PeakMemory(spec, self.model)
        self._routing = Routing.of(spec, self.model)
        self._layout = RowLayout(self.model, spec.trainer.micro_batch_tokens, self._routing)
        self._scorer = self._scorer_of(self.model, self._routing)
        reference = load_reference(spec, model_dir, self._scorer.device)
        self._judge = Judge.of(
            spec,
            self.model.config,
            self.ranks,
            contract or ContractFile(Store(spec.output.root), self.ranks.rank),
            self._scorer,
            None if reference is None else self._scorer_of(reference),
        )
        self._optimizer_step = OptimizerStep(
            self.model, spec.optimizer, self._schedule, self._judge
        )
        self._optimizer = self._optimizer_step.optimizer
        self._sender = WeightSender.of(spec, self.model, self.ranks)
        self.copy = WeightsCopy(self.model, self.ranks, getattr(torch, spec.inference.dtype))
        _log.info("trainer loaded", **self.describe())

    @property
    def sender(self) -> WeightSender:
        """What packs weights for engines. Raises ContractViolation where engines load files."""
        if self._sender is None:
            raise ContractViolation("engines of this run take weights from disk, not in buckets")
        return self._sender

    def progress(self) -> StageProgress:
        """What the running call has done so far; readable from any thread."""
        return self._progress

    def describe(self) -> dict[str, Any]:
        """Data types, parameter count, estimated and observed memory."""
        expected = self._memory.expected_bytes
        return describe_trainer(self.spec, self.model, expected, resident_bytes())

    def optimize(
        self, update: int, batch_sha256: str, groups: Sequence[SampleGroup]
    ) -> UpdateReport:
        """Apply update ``update``, which must be ``next_update``.

        Raises:
            ContractViolation: wrong index, a collection of the wrong shape, or samples too old.
            PolicyDisagreement: trainer and engines score the same tokens differently.
            NonFiniteLoss: a loss or gradient is not finite; that optimizer step was not taken.
            TrainerLost: an earlier update broke off between two of its optimizer steps.
        """
        self._refuse_torn_state()
        if update != self.next_update:
            raise ContractViolation(f"update {update} asked for, the next is {self.next_update}")
        started, cpu = time.perf_counter(), time.process_time()
        seed = update_seed(self.spec.data.seed, update)
        torch.manual_seed(seed)
        self._memory.begin()
        # The load of routers is of every sample of a step, not of those with a gradient alone.
        keep_tied = self._judge.settings.needs_every_sample or bool(self._routing.names)
        with agreed(self.ranks):
            batch = accepted(self.spec, groups)
            lag = batch.versions.lag(self.policy_version, self.spec.max_group_age)
            plans = plan_steps(batch, self.spec.steps_per_update, seed, keep_tied=keep_tied)
            shares = [plan.share(self.ranks.rank, self.ranks.world) for plan in plans]
            steps = [own for plan, own in zip(plans, shares, strict=True) if plan.has_signal]
        tally = UpdateTally()
        own = [member for share in shares for member in share.members]
        tokens = UpdateTokens.of(batch, self._scorer.device, members=own)
        if steps:
            extra = self._run_steps(tokens, steps, tally)
        else:
            extra = record_refresh(self._judge, tokens, update, self.policy_version)
        report = self._report(update, batch_sha256, len(steps), started)
        metrics = {
            **extra,
            **self._memory.conclude(update, self._judge.append),
            **advantage_metrics(batch),
            **clock_metrics(report, lag, self._published_step),
            "train/lr-pg_0": self._schedule.at(report.policy_version),
            "train/cpu_seconds": time.process_time() - cpu,
        }
        if steps:
            metrics |= self._token_metrics(tally, report.seconds)
        refuse_undeclared(metrics)
        self.last_report = report.model_copy(update={"metrics": metrics})
        self.next_update = update + 1
        self._steps_into_update = 0
        self._progress = StageProgress(stage="idle", detail=f"finished update {update}")
        return self.last_report

    def export_weights(self, version: int, folder: Path) -> WeightsRef:
        """Write the current weights in the engines' dtype into the new folder ``folder``."""
        self.require_version(version)
        self._progress = StageProgress(stage="export weights", detail=f"version {version}")
        dtype = getattr(torch, self.spec.inference.dtype)
        ref = export_weights(self.model, self.model_dir, version, folder, dtype, self.ranks)
        if self._sender is not None:
            ref = self._sender.describe(version, folder)
        self._published_step = version
        self._progress = StageProgress(stage="idle", detail=f"exported version {version}")
        return ref

    def offer_weights(self, version: int) -> WeightsRef:
        """Describe the current weights for engines that take them in buckets."""
        self.require_version(version)
        ref = self.sender.offer(version)
        self._published_step = version
        return ref

    def save(self, folder: Path) -> tuple[CheckpointFile, ...]:
        """Write everything that a resumed trainer needs into ``folder``; no pickle."""
        self._refuse_torn_state()
        self._progress = StageProgress(stage="save", detail=folder.name)
        clock = PolicyClock(
            completed_steps=self.policy_version,
            published_step=self._published_step,
            next_rollout_id=self.next_update,
        )
        state = TrainerState(clock=clock, last_report=self.last_report)
        files = write_state(folder, self.model, self._optimizer, state, self.ranks)
        self._progress = StageProgress(stage="idle", detail=f"saved {folder.name}")
        return files

    def load(self, folder: Path, clock: PolicyClock) -> None:
        """Restore from ``folder``; its own clock must be the marker's ``clock``.

        Raises:
            ContractViolation: another clock, or files that do not fit the model.
        """
        state = read_state(folder, self.model, self._optimizer, self.ranks)
        own = (state.clock.completed_steps, state.clock.next_rollout_id)
        if own != (clock.completed_steps, clock.next_rollout_id):
            raise ContractViolation(
                f"{folder}: the trainer state is of (completed steps, next update) {own}, its "
                f"marker says {(clock.completed_steps, clock.next_rollout_id)}"
            )
        if self._sender is not None:
            self._sender.drop()
        self.policy_version, self.next_update = own
        self.last_report = state.last_report
        self._published_step = -1
        self._steps_into_update = 0

    def export_hf(self, folder: Path, probe: ExportProbe, uri: str) -> ExportReport:
        """Write the final Hugging Face folder, re-load it and compare; see ``export.py``."""
        self._refuse_torn_state()
        self._progress = StageProgress(stage="export", detail=uri)
        report = export_hf(
            self.model,
            self.model_dir,
            folder,
            probe,
            policy_version=self.policy_version,
            uri=uri,
            scorer=self._scorer,
            ranks=self.ranks,
        )
        self._progress = StageProgress(stage="idle", detail=f"exported {uri}")
        return report

    def require_version(self, version: int) -> None:
        """Raise ContractViolation unless the weights are those of ``version``."""
        self._refuse_torn_state()
        if version != self.policy_version:
            raise ContractViolation(
                f"weights of version {version} asked for, the trainer holds {self.policy_version}"
            )

    def _scorer_of(self, model: Any, routing: Routing | None = None) -> Scorer:
        body = None
        if self.ranks.world > 1:
            stay = stays_gathered(model, self._dtype, self.ranks)
            body = shard(model, self._dtype, stay=stay)
        return scorer_of(self.spec, model, routing, body)

    def _run_steps(
        self, tokens: UpdateTokens, steps: Sequence[StepPlan], tally: UpdateTally
    ) -> dict[str, float]:
        """Take the optimizer steps of one update; ``steps`` are this rank's shares of them."""
        works = [self._work(tokens.batch, own) for own in steps]
        counted = [self._count(tokens.batch, work, i) for i, work in enumerate(works)]
        scores = UpdateScores(
            self._judge,
            tokens,
            works,
            rollout_id=self.next_update,
            policy_version=self.policy_version,
        )
        scores.score()
        if scores.has_pass:
            record_replay(self._judge, Phase.SCORING, self.next_update)
        metrics = scores.compare() if scores.standalone else {}
        scores.score_reference()
        for index, (work, counts) in enumerate(zip(works, counted, strict=True)):
            self._progress = StageProgress(
                stage=f"optimize {self.next_update}", done=index, total=len(works)
            )
            started = time.perf_counter()
            with agreed(self.ranks):
                rest = len(works) - 1 - index
                tokens.batch.versions.lag(self.policy_version, self.spec.max_policy_lag - rest)
            policy = self._backward(work, tokens, counts, tally)
            if not scores.standalone:  # then this is the only step
                metrics |= scores.compare()
            probe = ParameterProbe.due(self.spec, self.policy_version, self.model)
            metrics |= {} if probe is None else probe.metrics()
            metrics |= self._step()
            event = optimizer_event(
                tokens.batch,
                work,
                counts,
                reduction=self.spec.training.loss_aggregation,
                scoring_pass=scores.scoring_pass,
                policy_objective=policy,
                routers=self._routing.losses,
                probe=probe,
                metrics=metrics,
                lr_next=self._schedule.at(self.policy_version),
                step=self.policy_version,
                rollout_id=self.next_update,
                published_step=self._published_step,
                seconds=time.perf_counter() - started,
            )
            where = {"step": self.policy_version, "rollout_id": self.next_update}
            packing = packing_event(work, self.spec.trainer.micro_batch_tokens, **where)
            self._judge.append_all({OPTIMIZER: event, PACKING: packing})
            metrics |= record_load(self._judge, len(work.micros), **where)
            tally.add_packs(work.num_packs, len(work.scored))
        return metrics

    def _work(self, batch: TrainingBatch, own: StepPlan) -> StepWork:
        """This rank's share of an optimizer step, laid out."""
        micros = self._layout.micro_batches(batch, own, self.ranks)
        return StepWork(own.members, own.active, micros)

    def _count(self, batch: TrainingBatch, work: StepWork, index: int) -> Normalization:
        """What step ``index`` of the update is divided by, over all ranks."""
        counts = Normalization.of(batch, work.members, work.scored, work.model_tokens, self.ranks)
        with agreed(self.ranks):
            counts.check(self.spec.samples_per_step, self.policy_version + 1 + index)
        return counts

    def _backward(
        self, work: StepWork, tokens: UpdateTokens, counts: Normalization, tally: UpdateTally
    ) -> float:
        """Accumulate one step's gradient; fills ``tokens.old`` where it is still NaN.

        Returns:
            This rank's part of the loss, without that of routers.
        """
        weights = counts.weights(tokens.batch, self.spec.training)
        loss = StepLoss(tokens, weights, self._judge.settings, tally)
        self._optimizer_step.clear()
        self._routing.begin_step(counts.model_tokens, counts.documents)
        for micro in work.micros:
            self._scorer.backward(micro, loss, loss.look if loss.needs_look else None)
        tally.model_tokens += work.model_tokens
        error: NonFiniteLoss | None = None
        try:
            tally.step_losses.append(loss.finish())
            tally.router_losses.append(self._routing.losses.finish())
        except NonFiniteLoss as raised:
            error = raised
        self._optimizer_step.refuse_rejected(error, self.policy_version, self.next_update)
        record_replay(self._judge, Phase.TRAINING, self.next_update)
        return tally.step_losses[-1][0]

    def _step(self) -> dict[str, float]:
        """Check, clip, step; the clock moves with the weights."""
        norm, rate = self._optimizer_step.admit(
            self.policy_version, self._published_step, self.next_update
        )
        self._steps_into_update += 1
        moved = self._optimizer_step.apply(rate)
        self.policy_version += 1
        return {
            "train/grad_norm": norm,
            "train/parameter_change": moved,
            "train/lr_used-pg_0": rate,
        }

    def _token_metrics(self, tally: UpdateTally, seconds: float) -> dict[str, float]:
        """What the loss saw, over all ranks."""
        tally.reduce(self.ranks)
        rows = tally.metrics(self._judge.settings, has_routers=bool(self._routing.names))
        active = rows["train/active_response_tokens"]
        return rows | rate_metrics(tally.model_tokens, active, seconds, self.ranks.world)

    def _report(self, update: int, digest: str, steps: int, started: float) -> UpdateReport:
        own = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        return UpdateReport(
            update=update,
            batch_sha256=digest,
            policy_version=self.policy_version,
            optimizer_steps=steps,
            no_signal=steps == 0,
            seconds=float(self.ranks.all_reduce_max(own)),
            resident_bytes=resident_bytes(),
        )

    def _refuse_torn_state(self) -> None:
        """After a failure between two steps of one update the weights belong to no version."""
        if self._steps_into_update:
            raise TrainerLost(
                f"update {self.next_update} broke off after {self._steps_into_update} of "
                f"{self.spec.steps_per_update} optimizer steps; restore the newest checkpoint"
            )
