"""How the samples of an optimizer step become micro-batches: ``trainer.packing``."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from configs.run import RunSpec
from models.errors import ConfigurationError
from workers.trainers import flash4
from workers.trainers.batch import StepPlan, TrainingBatch, documents_of, rows_of
from workers.trainers.document_attention import takes_blocks, use_document_attention
from workers.trainers.documents import collate_documents, greedy_packs, leveled_packs
from workers.trainers.packing import MicroBatch, filler, micro_batches
from workers.trainers.ranks import Ranks, agreed
from workers.trainers.replay import refuse_bad_routes
from workers.trainers.routers import find_routers
from workers.trainers.routing import Routing
from workers.trainers.varlen_attention import head_size, kernel_takes

Packing = Literal["shared_prompt", "documents"]


def prepare_packing(spec: RunSpec, model: Any) -> Packing:
    """The layout that ``model`` is trained in; lets it attend within documents where it needs to.

    "shared_prompt" computes a prompt once for its samples, which is less work. With routers that
    would count its tokens, and need their routes, once for many samples: so they have "documents".
    So have models for which there is the kernel for documents: a shared prompt needs a mask, which
    makes attention cost the square of a whole row.

    Raises:
        ConfigurationError: the layout does not go with the model, or a sample does not fit it, or
            what was asked for needs the kernel and the kernel does not take the model.
    """
    routed = bool(find_routers(model))
    dtype = getattr(torch, spec.trainer.compute_dtype)
    kernel = spec.trainer.attention != "eager" and kernel_takes(model, dtype)
    packing = spec.trainer.packing or ("documents" if routed or kernel else "shared_prompt")
    _refuse_missing_kernel(spec, model, kernel=kernel and packing == "documents", routed=routed)
    if packing == "shared_prompt":
        if routed:
            raise ConfigurationError(
                f"trainer.packing = {packing!r} computes a prompt once for all its samples, and "
                "the load and the routes of experts are per sample; a mixture of experts needs "
                '"documents"'
            )
        return packing
    longest, budget = spec.core.max_context_length, spec.trainer.micro_batch_tokens
    if longest > budget:
        raise ConfigurationError(
            f"a document of core.max_context_length = {longest} tokens does not fit "
            f"trainer.micro_batch_tokens = {budget}; raise the latter to at least {longest}"
        )
    use_document_attention(model, "flash4" if spec.trainer.attention == "flash4" else "torch")
    return packing


def _refuse_missing_kernel(spec: RunSpec, model: Any, *, kernel: bool, routed: bool) -> None:
    trainer, device = spec.trainer, next(model.parameters()).device
    asking = {
        f'trainer.attention = "{trainer.attention}"': trainer.attention in ("flash", "flash4"),
        "trainer.compile": trainer.compile,
    }
    for key, asked in asking.items():
        if asked and not kernel:
            raise ConfigurationError(
                f"{key} needs the attention kernel for documents: an NVIDIA GPU (Ampere or newer), "
                "bfloat16, heads of at most 256 and a multiple of 8, trainer.packing = "
                f'"documents"; here: {device.type}, {trainer.compute_dtype}, heads of '
                f"{head_size(model.config)}, trainer.packing = {trainer.packing!r}; remove it"
            )
    why = flash4.missing(device) if trainer.attention == "flash4" else None
    if why:
        raise ConfigurationError(
            f'trainer.attention = "flash4": {why}, or set trainer.attention = "flash"'
        )
    if trainer.compile and routed:
        raise ConfigurationError(
            f"trainer.compile: {type(model).__name__} is a mixture of experts, whose routers are "
            "counted and replayed between operations and cannot be compiled; remove it"
        )


class RowLayout:
    """Lays out the steps of one trainer."""

    def __init__(self, model: Any, token_budget: int, routing: Routing) -> None:
        """``model``: a prepared one; ``token_budget``: of a micro-batch."""
        self._documents = takes_blocks(model)
        self._budget = token_budget
        self._routing = routing

    def micro_batches(self, batch: TrainingBatch, own: StepPlan, ranks: Ranks) -> list[MicroBatch]:
        """Lay out one rank's share ``own`` of a step, in as many micro-batches as on every rank.

        Raises:
            ContractViolation: replay, and a sample without good routes; on all ranks together.
        """
        if not self._documents:
            with agreed(ranks):
                rows = micro_batches(rows_of(batch, own.active), self._budget)
            return _filled(rows, _most(rows, ranks))
        with agreed(ranks):
            if self._routing.replay:
                refuse_bad_routes(batch, own.members, self._routing.shape)
            documents = documents_of(batch, own.active)
            packs = greedy_packs([document.num_tokens for document in documents], self._budget)
        most = _most(packs, ranks)
        leveled = leveled_packs(packs, most)
        return _filled([collate_documents([documents[i] for i in pack]) for pack in leveled], most)


def _most(own: Sequence[object], ranks: Ranks) -> int:
    """The largest number of them on any rank."""
    return int(ranks.all_reduce_max(torch.tensor([len(own)])))


def _filled(micros: list[MicroBatch], count: int) -> list[MicroBatch]:
    """``micros`` and fillers, ``count`` together."""
    return micros + [filler()] * (count - len(micros))
