"""The trainer in one process: a model, AdamW in float32, one update at a time.

One update: validate the collection -> deal samples to optimizer steps -> old log-probs of all but
the first step -> for each step: packed forward and backward, check, clip, AdamW. The log-probs of
the first step's own forward are its old log-probs, so its ratios are exactly 1.
"""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import structlog
import torch
from torch import Tensor

from activities.storage.store import Store
from configs.run import RunSpec
from models.checkpoint import CheckpointFile, PolicyClock
from models.errors import ContractViolation, NonFiniteLoss, PolicyDisagreement, TrainerLost
from models.evaluation import ExportReport
from models.metrics import refuse_undeclared
from models.ports import StageProgress
from models.publication import WeightsRef
from models.sample import SampleGroup
from models.update import UpdateReport
from workers.trainers.adamw import build_optimizer, clip_gradients, last_step_norm
from workers.trainers.batch import StepPlan, TrainingBatch, plan_steps, rows_of, update_seed
from workers.trainers.contract_file import ContractFile
from workers.trainers.export import ExportProbe, export_hf
from workers.trainers.load import describe_trainer, load_policy
from workers.trainers.logprobs import Scorer
from workers.trainers.loss import LossSettings, aggregation_weights, token_loss
from workers.trainers.packing import micro_batches
from workers.trainers.refresh_scores import REFRESH_SCORES, refresh_metrics, refresh_scores
from workers.trainers.schedule import LearningRate
from workers.trainers.state import TrainerState, read_state, write_state
from workers.trainers.tally import UpdateTally, advantage_metrics
from workers.trainers.weights import export_weights, num_weight_bytes

_log = structlog.get_logger(__name__)


class LocalTrainer:
    """Owns the policy's weights. Not thread-safe: ``GuardedTrainer`` serializes the calls.

    Without ``trainer.num_threads`` torch keeps what its process's environment gave it.
    """

    def __init__(
        self, spec: RunSpec, model_dir: Path, contract: ContractFile | None = None
    ) -> None:
        """``contract``: where events go; default: below ``output.root``."""
        if spec.trainer.num_threads is not None:
            torch.set_num_threads(spec.trainer.num_threads)
        self.spec = spec
        self.model_dir = model_dir
        self._contract = contract or ContractFile(Store(spec.output.root))
        self.next_update = 0
        self.policy_version = 0
        self.last_report: UpdateReport | None = None
        self._published_step = -1
        self._progress = StageProgress(stage="idle")
        self._steps_into_update = 0
        self._dtype = getattr(torch, spec.trainer.compute_dtype)
        self._settings = LossSettings.of(spec)
        self._schedule = LearningRate.of(spec)
        self.model: Any = load_policy(spec, model_dir)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = build_optimizer(self._parameters, spec.optimizer)
        self._scorer = Scorer.of(
            self.model, spec.inference.temperature, spec.trainer.logprob_chunk_tokens, self._dtype
        )
        _log.info("trainer loaded", **self.describe())

    def progress(self) -> StageProgress:
        """What the running call has done so far; readable from any thread."""
        return self._progress

    def describe(self) -> dict[str, Any]:
        """Data types, parameter count, estimated and observed memory."""
        return describe_trainer(self.spec, self.model, _resident_bytes())

    @property
    def export_num_bytes(self) -> int:
        """Bytes of one export for engines."""
        return num_weight_bytes(self.model, getattr(torch, self.spec.inference.dtype))

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
        batch = self._accept(groups)
        lag = batch.versions.lag(self.policy_version, self.spec.max_group_age)
        plans = plan_steps(
            batch, self.spec.steps_per_update, seed, keep_tied=self._settings.entropy_coef != 0
        )
        tally = UpdateTally()
        steps = [plan for plan in plans if plan.has_signal]
        if steps:
            extra = self._run_steps(batch, steps, tally)
        else:
            extra = self._record_scores(batch, self._unscored(batch))
        report = self._report(update, batch_sha256, len(steps), started)
        metrics = {
            **extra,
            **advantage_metrics(batch),
            **self._clock_metrics(report, lag, time.process_time() - cpu),
        }
        if steps:
            metrics |= tally.metrics(uses_tis=self._settings.use_tis)
            metrics["train/model_tokens_per_second"] = tally.model_tokens / report.seconds
        refuse_undeclared(metrics)
        self.last_report = report.model_copy(update={"metrics": metrics})
        self.next_update = update + 1
        self._steps_into_update = 0
        self._progress = StageProgress(stage="idle", detail=f"finished update {update}")
        return self.last_report

    def export_weights(self, version: int, folder: Path) -> WeightsRef:
        """Write the current weights in the engines' dtype into the new folder ``folder``."""
        self._refuse_torn_state()
        if version != self.policy_version:
            raise ContractViolation(
                f"weights of version {version} asked for, the trainer holds {self.policy_version}"
            )
        self._progress = StageProgress(stage="export weights", detail=f"version {version}")
        dtype = getattr(torch, self.spec.inference.dtype)
        ref = export_weights(self.model, self.model_dir, version, folder, dtype)
        self._published_step = version
        self._progress = StageProgress(stage="idle", detail=f"exported version {version}")
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
        files = write_state(folder, self.model, self._optimizer, state)
        self._progress = StageProgress(stage="idle", detail=f"saved {folder.name}")
        return files

    def load(self, folder: Path, clock: PolicyClock) -> None:
        """Restore from ``folder``; its own clock must be the marker's ``clock``.

        Raises:
            ContractViolation: another clock, or files that do not fit the model.
        """
        state = read_state(folder, self.model, self._optimizer)
        own = (state.clock.completed_steps, state.clock.next_rollout_id)
        if own != (clock.completed_steps, clock.next_rollout_id):
            raise ContractViolation(
                f"{folder}: the trainer state is of (completed steps, next update) {own}, its "
                f"marker says {(clock.completed_steps, clock.next_rollout_id)}"
            )
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
        )
        self._progress = StageProgress(stage="idle", detail=f"exported {uri}")
        return report

    def _accept(self, groups: Sequence[SampleGroup]) -> TrainingBatch:
        batch = TrainingBatch.of(groups)
        expected = self.spec.samples_per_collection
        if len(batch.samples) != expected:
            raise ContractViolation(
                f"the collection holds {len(batch.samples)} samples, "
                f"training.rollout_batch_size x training.samples_per_prompt is {expected}"
            )
        return batch

    def _run_steps(
        self, batch: TrainingBatch, steps: list[StepPlan], tally: UpdateTally
    ) -> dict[str, float]:
        """Take the optimizer steps of one update."""
        old = self._old_logprobs(batch, steps[1:])
        scores: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for index, plan in enumerate(steps):
            self._progress = StageProgress(
                stage=f"optimize {self.next_update}", done=index, total=len(steps)
            )
            rest = len(steps) - 1 - index
            batch.versions.lag(self.policy_version, self.spec.max_policy_lag - rest)
            self._backward(batch, plan, old, tally)
            if index == 0:
                scores = self._record_scores(batch, old)
                self._check_agreement(batch, old)
            metrics = self._step()
        return scores | metrics

    def _old_logprobs(self, batch: TrainingBatch, later_steps: Sequence[StepPlan]) -> Tensor:
        """Log-probs [N] before the update; NaN where the first step's own forward supplies them."""
        device = self._scorer.device
        old = self._unscored(batch)
        members = [member for plan in later_steps for member in plan.active]
        budget = self.spec.trainer.micro_batch_tokens
        for micro in micro_batches(rows_of(batch, sorted(members)), budget):
            logprobs, _ = self._scorer.score(micro)
            old[micro.token_index.to(device)] = logprobs
        return old

    def _unscored(self, batch: TrainingBatch) -> Tensor:
        return torch.full((batch.num_tokens,), float("nan"), device=self._scorer.device)

    def _record_scores(self, batch: TrainingBatch, old: Tensor) -> dict[str, float]:
        """Append the update's ``refresh_scores`` event before any weight changes.

        A kill after it repeats the whole update and so the event, which readers of the file expect;
        a disk without room leaves the trainer as it was.
        """
        if self.spec.core.publication_mode != "refresh":
            return {}
        event = refresh_scores(
            batch,
            old,
            self._settings,
            rollout_id=self.next_update,
            policy_version=self.policy_version,
        )
        self._contract.append(REFRESH_SCORES, event)
        return refresh_metrics(event)

    def _backward(
        self, batch: TrainingBatch, plan: StepPlan, old: Tensor, tally: UpdateTally
    ) -> None:
        """Accumulate one step's gradient; fills ``old`` where it is still NaN."""
        lengths = torch.tensor([len(s.response_ids) for s in batch.samples])
        counted = lengths[list(plan.members)]
        per_sample = aggregation_weights(
            lengths,
            self.spec.training.loss_aggregation,
            num_samples=len(plan.members),
            num_tokens=int(counted.clamp(min=1).sum()),
        )
        device = self._scorer.device
        weights = per_sample.float().repeat_interleave(lengths).to(device)
        behavior, advantages = batch.behavior.to(device), batch.advantages.to(device)
        total = policy = 0.0

        def chunk_loss(new: Tensor, entropy: Tensor, index: Tensor) -> Tensor:
            nonlocal total, policy
            known = old[index]
            anchor = torch.where(known.isnan(), new.detach(), known)
            old[index] = anchor
            parts = token_loss(
                new, anchor, behavior[index], advantages[index], entropy, self._settings
            )
            tally.add(parts, new, anchor, behavior[index], entropy)
            loss = (parts.total * weights[index]).sum()
            total += float(loss.detach())
            policy += float((parts.policy.detach() * weights[index]).sum())
            return loss

        self._optimizer.zero_grad(set_to_none=True)
        budget = self.spec.trainer.micro_batch_tokens
        for micro in micro_batches(rows_of(batch, plan.active), budget):
            tally.model_tokens += micro.num_model_tokens
            self._scorer.backward(micro, chunk_loss)
        tally.step_losses.append(total)
        tally.step_policy_losses.append(policy)
        if not math.isfinite(total):
            raise NonFiniteLoss(f"the loss is {total}; the optimizer step was not taken")

    def _check_agreement(self, batch: TrainingBatch, old: Tensor) -> None:
        """Compare trainer and behavior log-probs before the first weights change."""
        limit = self.spec.core.max_train_rollout_logprob_abs_diff
        seen = ~old.isnan()
        gap = (old[seen].double() - batch.behavior.to(old.device)[seen].double()).abs()
        mean = float(gap.mean()) if len(gap) else 0.0
        if limit is None or mean <= limit:
            return
        raise PolicyDisagreement(
            f"mean |trainer - engine| log-prob gap {mean:.4g} over {len(gap)} tokens exceeds "
            f"core.max_train_rollout_logprob_abs_diff = {limit:.4g} (largest {float(gap.max()):.4g}"
            f"); likely: {_likely_cause(mean)}"
        )

    def _step(self) -> dict[str, float]:
        """Clip, set the learning rate, step; the clock moves with the weights."""
        norm = clip_gradients(self._parameters, self.spec.optimizer.clip_grad)
        rate = self._schedule.at(self.policy_version)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._steps_into_update += 1
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.policy_version += 1
        return {
            "train/grad_norm": norm,
            "train/parameter_change": last_step_norm(self._optimizer),
            "train/lr_used": rate,
        }

    def _report(self, update: int, digest: str, steps: int, started: float) -> UpdateReport:
        return UpdateReport(
            update=update,
            batch_sha256=digest,
            policy_version=self.policy_version,
            optimizer_steps=steps,
            no_signal=steps == 0,
            seconds=time.perf_counter() - started,
            resident_bytes=_resident_bytes(),
        )

    def _clock_metrics(self, report: UpdateReport, lag: int, cpu: float) -> dict[str, float]:
        return {
            "train/step": float(report.policy_version - 1),
            "train/completed_steps": float(report.policy_version),
            "train/rollout_id": float(report.update),
            "train/optimizer_steps": float(report.optimizer_steps),
            "train/no_signal": float(report.no_signal),
            "train/lr_next": self._schedule.at(report.policy_version),
            "train/lag": float(lag),
            "train/step_seconds": report.seconds,
            "train/cpu_seconds": cpu,
            "train/resident_bytes": float(report.resident_bytes),
        }

    def _refuse_torn_state(self) -> None:
        """After a failure between two steps of one update the weights belong to no version."""
        if self._steps_into_update:
            raise TrainerLost(
                f"update {self.next_update} broke off after {self._steps_into_update} of "
                f"{self.spec.steps_per_update} optimizer steps; restore the newest checkpoint"
            )


def _likely_cause(mean: float) -> str:
    """What usually makes gaps of this size."""
    if mean > 1.0:
        return "tokens or weights shifted: another version, another token's log-prob, wrong model"
    if mean > 0.1:
        return "a temperature, top-p or top-k applied on one side only, or stale weights"
    return "different dtypes or kernels; raise the limit or use float32 on both sides"


def _resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)
