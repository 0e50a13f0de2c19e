"""Memory of a trainer process: what was expected of it beside what was seen."""

import os
from collections.abc import Callable
from typing import Any

import psutil
import torch

from configs.memory import ModelShape
from configs.run import RunSpec
from configs.trainer_memory import TrainerMemory, trainer_memory
from workers.engines.sglang.arguments import COLOCATED_FRACTION

MEMORY = "memory"

_FREE_SHARE = 0.75
"""Of a GPU that is free, with what a step cached kept, when engines have given theirs back: an
engine that starts anew takes its share of what it finds."""
_ENGINE_MARGIN = 0.1
"""Of a GPU: what an engine takes beside the share that it was told, for graphs and activations."""

Metrics = dict[str, float]


def expected_memory(spec: RunSpec, model: Any) -> TrainerMemory:
    """The estimate for a loaded transformers model."""
    config = model.config
    heads = config.num_attention_heads
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    parameters = sum(p.numel() for p in model.parameters())
    shape = ModelShape(
        num_parameters=parameters,
        num_active_parameters=parameters,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        hidden_size=config.hidden_size,
        num_heads=heads,
        intermediate_size=width * getattr(config, "num_experts_per_tok", 1),
    )
    on_gpu = next(model.parameters()).is_cuda
    return trainer_memory(spec, shape, on_gpu=on_gpu)


def leaves_room(spec: RunSpec, free_bytes: int, device_bytes: int) -> bool:
    """Whether a GPU of ``device_bytes`` with ``free_bytes`` has room for an engine that comes back.

    Then a trainer that takes turns with it keeps what its step cached: asking the driver for
    gigabytes again takes longer than a small step computes.
    """
    fraction = spec.inference.sglang.get("mem_fraction_static", COLOCATED_FRACTION)
    share = fraction if isinstance(fraction, float) else COLOCATED_FRACTION
    return free_bytes >= max(_FREE_SHARE, share + _ENGINE_MARGIN) * device_bytes


class PeakMemory:
    """The most that one update takes of this process's GPU; without one nothing is told."""

    def __init__(self, spec: RunSpec, model: Any) -> None:
        """``model``: a loaded one, before its parameters are dealt to ranks."""
        expected = expected_memory(spec, model)
        self.expected_bytes = expected.of_process(spec.trainer.num_processes)
        self._device = next(model.parameters()).device
        self._spec = spec

    def begin(self) -> None:
        """Forget earlier peaks."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def conclude(self, rollout_id: int, tell: Callable[[str, dict[str, Any]], None]) -> Metrics:
        """Tell the ``memory`` event of an update and return ``train/memory/*``.

        Reserved memory includes what the allocator keeps. What only a step needs is given back
        where engines take their turn on the same GPU and would lack it.
        """
        if self._device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        if self._spec.colocated and not leaves_room(self._spec, free, total):
            torch.cuda.empty_cache()
        event = {
            "rollout_id": rollout_id,
            "estimated_bytes": self.expected_bytes,
            "peak_allocated_bytes": peak,
            "peak_reserved_bytes": reserved,
            "device_bytes": total,
        }
        tell(MEMORY, event)
        return {
            "train/packing/rank0_peak_allocated_bytes": float(peak),
            "train/memory/estimated_bytes": float(self.expected_bytes),
            "train/memory/peak_reserved_bytes": float(reserved),
            "train/memory/peak_to_estimate": peak / self.expected_bytes,
        }


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process(os.getpid()).memory_info().rss)
