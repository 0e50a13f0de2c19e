"""What tests ask the ranks of a ``RankPool`` to do. Tensors come back as arrays, whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from step_reference import chunks, layout
from torch.profiler import ProfilerActivity, profile

from activities.storage.store import Store
from configs.run import RunSpec
from models.checkpoint import CheckpointFile, PolicyClock
from models.evaluation import ExportReport
from models.publication import WeightsRef
from models.sample import SampleGroup
from models.update import UpdateReport
from workers.trainers.batch import TrainingBatch, documents_of
from workers.trainers.contract_file import ContractFile
from workers.trainers.decoder_layers import recompute_layers
from workers.trainers.document_attention import use_document_attention
from workers.trainers.documents import collate_documents
from workers.trainers.export import ExportProbe
from workers.trainers.load import load_model
from workers.trainers.local import LocalTrainer
from workers.trainers.logprobs import Scorer
from workers.trainers.loss import LossSettings
from workers.trainers.normalization import Normalization
from workers.trainers.packing import filler
from workers.trainers.process_ranks import ProcessRanks
from workers.trainers.router_losses import RouterObjective
from workers.trainers.routers import find_routers
from workers.trainers.routing import Routing
from workers.trainers.sharded import shard
from workers.trainers.shards import is_sharded, whole
from workers.trainers.step_loss import StepLoss, UpdateTokens
from workers.trainers.tally import UpdateTally

Arrays = dict[str, numpy.ndarray]


def gradient(
    ranks: ProcessRanks,
    model_dir: Path,
    frozen_dir: Path | None,
    groups: list[SampleGroup],
    settings: LossSettings,
    aggregation: str,
    old: numpy.ndarray | None,
    packed: bool,
    count: int,
) -> tuple[float, Arrays]:
    """Loss and gradient of one step in float64, this rank's half in ``count`` micro-batches.

    The second rank lays its half out in half as many, and computes fillers.
    """
    scorer, model = _scorer(model_dir)
    batch = TrainingBatch.of(groups)
    tokens = UpdateTokens.of(batch, torch.device("cpu"), torch.float64)
    if old is not None:
        tokens.old = torch.from_numpy(old.copy())
    size = len(batch.samples) // ranks.world
    members = list(range(ranks.rank * size, (ranks.rank + 1) * size))
    own_count = count if ranks.rank == 0 else max(1, count // 2)
    micros = [layout(batch, part, packed) for part in chunks(members, own_count)]
    micros += [filler()] * (count - len(micros))
    if frozen_dir is not None:
        reference, _ = _scorer(frozen_dir)
        for micro in micros:
            tokens.reference[micro.token_index] = reference.score(micro)[0]
    model_tokens = sum(micro.num_model_tokens for micro in micros)
    counts = Normalization.of(batch, members, members, model_tokens, ranks)
    section: Any = type("Section", (), {"loss_aggregation": aggregation})
    loss = StepLoss(tokens, counts.weights(batch, section), settings, UpdateTally())
    for micro in micros:
        scorer.backward(micro, loss, loss.look if loss.needs_look else None)
    total = ranks.all_reduce_sum(torch.tensor(loss.finish()[0], dtype=torch.float64))
    return float(total), {n: whole(p.grad).cpu().numpy() for n, p in model.named_parameters()}


def router_gradient(
    ranks: ProcessRanks,
    model_dir: Path,
    groups: list[SampleGroup],
    objective: RouterObjective,
    recompute: bool,
) -> tuple[float, Arrays]:
    """Auxiliary losses of one step of a mixture and their gradient, in float64.

    The first rank lays its half out in two packs, the second in one and a filler.
    """
    model = load_model(model_dir, attention="sdpa", dtype=torch.float64).eval()
    use_document_attention(model)
    if recompute:
        recompute_layers(model)
    routing = Routing(find_routers(model), objective=objective)
    body = shard(model, torch.float64)
    scorer = Scorer.of(model, 1.0, 5, torch.float64, routing, body)
    batch = TrainingBatch.of(groups)
    size = len(batch.samples) // ranks.world
    members = range(ranks.rank * size, (ranks.rank + 1) * size)
    parts = chunks(members, 2 - ranks.rank)
    micros = [collate_documents(documents_of(batch, part)) for part in parts]
    micros += [filler()] * (2 - len(micros))
    tokens = sum(micro.num_model_tokens for micro in micros)
    counts = Normalization.of(batch, members, members, tokens, ranks)
    routing.begin_step(counts.model_tokens, counts.documents)
    for micro in micros:
        scorer.backward(micro, lambda new, _entropy, _index: 0.0 * new.sum())
    total = ranks.all_reduce_sum(torch.tensor(routing.losses.finish(), dtype=torch.float64))
    return float(total.sum()), {
        name: whole(p.grad).cpu().numpy() for name, p in model.named_parameters()
    }


def gatherings(
    ranks: ProcessRanks, model_dir: Path, groups: list[SampleGroup], stay: bool
) -> tuple[int, int, int]:
    """All-gathers of one micro-batch in training and of one that is scored; what stays gathered.

    The last is a number of parameters, after both.
    """
    scorer, model = _scorer(model_dir, stay=stay)
    batch = TrainingBatch.of(groups)
    micro = layout(batch, range(len(batch.samples)), True)
    seen = []
    for work in (
        lambda: scorer.backward(micro, lambda new, _entropy, _index: new.sum()),
        lambda: scorer.score(micro),
    ):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            work()
        rows = profiled.key_averages()
        seen.append(sum(row.count for row in rows if row.key == "c10d::_allgather_base_"))
    return seen[0], seen[1], sum(not is_sharded(p) for p in model.parameters())


def _scorer(folder: Path, *, stay: bool = False) -> tuple[Scorer, Any]:
    model = load_model(folder, attention="sdpa", dtype=torch.float64).eval()
    body = shard(model, torch.float64, stay=stay)
    return Scorer.of(model, 1.0, 5, torch.float64, body=body), model


@dataclass(frozen=True)
class Job:
    """A trainer's life, step by step. Folders are the same on every rank."""

    spec: RunSpec
    model_dir: Path
    load: tuple[Path, PolicyClock] | None = None
    updates: Sequence[tuple[int, list[SampleGroup]]] = ()
    export: Path | None = None
    copy: Path | None = None
    """Where the first rank writes the copy that all of them made."""
    save: Path | None = None
    export_model: Path | None = None


@dataclass
class Outcome:
    """What came of it on one rank."""

    reports: list[UpdateReport] = field(default_factory=list)
    parameters: Arrays = field(default_factory=dict)
    moments: Arrays = field(default_factory=dict)
    exported: WeightsRef | None = None
    saved: tuple[CheckpointFile, ...] = ()
    model: ExportReport | None = None
    local_elements: int = 0
    """Elements of parameters that this rank holds between updates."""


def live(ranks: Any, job: Job) -> Outcome:
    """Do ``job`` as one of ``ranks``."""
    torch.set_num_threads(1)
    store = Store(job.spec.output.root)
    trainer = LocalTrainer(job.spec, job.model_dir, ContractFile(store, ranks.rank), ranks)
    outcome = Outcome()
    if job.load is not None:
        trainer.load(*job.load)
    for update, groups in job.updates:
        outcome.reports.append(trainer.optimize(update, f"digest-{update}", groups))
    if job.export is not None:
        outcome.exported = trainer.export_weights(trainer.policy_version, job.export)
    if job.copy is not None:
        trainer.copy.take()
        if ranks.rank == 0:
            trainer.copy.write(job.model_dir, job.copy)
    if job.save is not None:
        outcome.saved = trainer.save(job.save)
    if job.export_model is not None:
        probe = ExportProbe(prompt_ids=(1, 20, 30, 40), question="what?", max_new_tokens=4)
        outcome.model = trainer.export_hf(job.export_model, probe, "hf")
    state = trainer._optimizer.state
    for name, parameter in trainer.model.named_parameters():
        outcome.parameters[name] = whole(parameter).detach().cpu().numpy().copy()
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        outcome.local_elements += local.numel()
        for key, value in state.get(parameter, {}).items():
            outcome.moments[f"{key}.{name}"] = whole(value).cpu().numpy().copy()
    return outcome
