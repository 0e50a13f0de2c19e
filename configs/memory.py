"""How many bytes a run will hold, from the model's shape alone. No weights are read."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.capacity import completed_groups_capacity, concurrent_groups
from configs.held_out import has_background_evaluation
from configs.model import TinySpec
from configs.paths import local_model_folder
from configs.run import RunSpec
from configs.trainer_memory import DTYPE_BYTES, trainer_memory

_PROCESS_BYTES = 350 << 20
"""Interpreter, torch and transformers, resident in each process that computes (measured)."""
_CONTROL_PROCESS_BYTES = 120 << 20
"""Interpreter, Ray and Arrow, resident in the producer; the router stays below it (measured)."""
_HELD_TOKEN_BYTES = 72
"""A token and its log-prob in a finished sample: two boxed numbers in two lists (measured)."""
_ROUTE_BYTES = 4
"""One expert id."""
_ROUTER_END = ".mlp.gate.weight"
"""End of the name of a router's tensor, one a routed layer."""
_EXPERT_PART = ".mlp.experts."
"""Part of the name of every tensor that belongs to a routed expert."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the estimate needs to know of a decoder."""

    num_parameters: int
    num_active_parameters: int
    """Those that one token goes through: all, or less with a mixture of experts."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    route_bytes: int = 0
    """Of the expert routes of one token: int32 [routed layers, top k]; 0 without experts."""
    hidden_size: int = 0
    """Width of the residual stream; 0 when unknown, as below."""
    num_heads: int = 0
    """Of queries."""
    intermediate_size: int = 0
    """Width of the feed-forward that one token goes through, all its experts together."""


def model_shape(spec: RunSpec) -> ModelShape | None:
    """The shape of the run's model where this machine can tell: tiny models, local folders."""
    if spec.model.source == "tiny":
        return tiny_shape(spec.model.tiny or TinySpec())
    folder = known_folder(spec)
    return None if folder is None else folder_shape(folder)


def known_folder(spec: RunSpec) -> Path | None:
    """The folder of the run's model on this machine: what it names, or what it has prepared."""
    candidates = [local_model_folder(spec.model.source)]
    if spec.output.root.startswith("/"):
        candidates.append(Path(spec.output.root) / "prepared" / "hf")
    for folder in candidates:
        if folder is not None and (folder / "config.json").is_file():
            return folder
    return None


def tiny_shape(tiny: TinySpec) -> ModelShape:
    """Count a tiny decoder.

    Dense Qwen3 has a tied embedding and a feed-forward of width F: three D x F matrices. A
    mixture of E experts of width I has three D x I matrices each, a router of E x D, and a head of
    its own. A layer has q and o of D x (heads x head), k and v of D x (kv heads x head), two norms
    of D, and query and key norms: of the head size in Qwen3, of all heads in OLMoE. One norm of D
    ends the stack.
    """
    width, head = tiny.hidden_size, tiny.head_size
    query_width, kv_width = tiny.num_heads * head, tiny.num_kv_heads * head
    norms = 2 * width + (width + kv_width if tiny.architecture == "olmoe" else 2 * head)
    layer = active_layer = 2 * width * (query_width + kv_width) + norms
    experts = tiny.experts
    if experts is None:
        layer += 3 * width * tiny.inner_size
        active_layer = layer
    else:
        router, expert = experts.num_experts * width, 3 * width * experts.moe_intermediate_size
        layer += router + experts.num_experts * expert
        active_layer += router + experts.experts_per_token * expert
    outside = tiny.vocab_size * width * (1 if experts is None else 2) + width
    return ModelShape(
        num_parameters=outside + tiny.num_layers * layer,
        num_active_parameters=outside + tiny.num_layers * active_layer,
        num_layers=tiny.num_layers,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=head,
        vocab_size=tiny.vocab_size,
        route_bytes=0
        if experts is None
        else _ROUTE_BYTES * tiny.num_layers * experts.experts_per_token,
        hidden_size=width,
        num_heads=tiny.num_heads,
        intermediate_size=tiny.inner_size
        if experts is None
        else experts.experts_per_token * experts.moe_intermediate_size,
    )


def folder_shape(folder: Path) -> ModelShape | None:
    """Read ``config.json`` and the headers of the safetensors files.

    None for a folder that says too little or is damaged: whoever uses its model says what is wrong.
    """
    try:
        return _read_shape(folder)
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, struct.error):
        return None


def _read_shape(folder: Path) -> ModelShape | None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    files = sorted(folder.glob("*.safetensors"))
    if not files or "num_hidden_layers" not in config:
        return None
    heads = config["num_attention_heads"]
    sizes = {name: size for file in files for name, size in _tensor_sizes(file).items()}
    return ModelShape(
        num_parameters=sum(sizes.values()),
        num_active_parameters=sum(sizes.values()) - _idle_elements(sizes, config),
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        route_bytes=_ROUTE_BYTES
        * sum(name.endswith(_ROUTER_END) for name in sizes)
        * config.get("num_experts_per_tok", 0),
        hidden_size=config.get("hidden_size", 0),
        num_heads=heads,
        intermediate_size=_feed_forward(config),
    )


def _feed_forward(config: dict[str, Any]) -> int:
    """Width that one token goes through."""
    experts: int = config.get("num_experts_per_tok", 0)
    width: int = config.get("moe_intermediate_size") or config.get("intermediate_size", 0)
    return width * (experts or 1)


def estimate(spec: RunSpec, shape: ModelShape) -> dict[str, int]:
    """Bytes of the trainer's, the producer's and one engine's largest holdings, and of all.

    Engine: weights, and keys and values of every running request at its full length, as far as
    the KV budget goes. A background evaluation has an engine of its own. All: trainer, engines,
    producer and router; Ray and Temporal come on top.
    """
    training = trainer_memory(spec, shape, on_gpu=spec.gpu_demand is not None)
    serving = DTYPE_BYTES[spec.inference.dtype]
    weights = serving * shape.num_parameters
    tokens = spec.inference.max_running_requests * spec.core.max_context_length
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * serving
    cache = min(tokens * per_token, spec.inference.kv_cache_mib << 20)
    processes = spec.trainer.num_processes
    trainer = processes * (training.of_process(processes) + _PROCESS_BYTES)
    engines = spec.inference.num_engines + has_background_evaluation(spec)
    replays = spec.training.use_rollout_routing_replay
    groups = producer_bytes(spec, shape.route_bytes if replays else 0)
    control = (1 + spec.fully_async) * _CONTROL_PROCESS_BYTES
    return {
        "num_parameters": shape.num_parameters,
        "num_active_parameters": shape.num_active_parameters,
        "trainer_states_bytes": training.states,
        "trainer_activations_bytes": training.activations,
        "trainer_logits_bytes": training.logits,
        "trainer_process_bytes": training.of_process(processes),
        "engine_weights_bytes": weights,
        "engine_kv_cache_bytes": cache,
        "producer_groups_bytes": groups,
        "total_bytes": trainer + engines * (weights + cache + _PROCESS_BYTES) + groups + control,
    }


def producer_bytes(spec: RunSpec, route_bytes: int = 0) -> int:
    """Bytes of the samples that the producer holds when each has its full length.

    ``route_bytes``: of the expert routes of a token, where they are replayed.

    That is one collection, and when fully async also what is in the making and what waits. With
    sample granularity, finished siblings that wait for a slow one come on top.
    """
    samples = spec.samples_per_collection
    if spec.fully_async:
        groups = concurrent_groups(spec) + completed_groups_capacity(spec)
        samples += groups * spec.training.samples_per_prompt
    return samples * spec.core.max_context_length * (_HELD_TOKEN_BYTES + route_bytes)


def _idle_elements(sizes: dict[str, int], config: dict[str, Any]) -> int:
    """Elements of the experts that a token does not go through."""
    in_experts = sum(size for name, size in sizes.items() if _EXPERT_PART in name)
    if not in_experts:
        return 0
    experts: int = config.get("num_experts") or config["num_local_experts"]
    chosen: int = config["num_experts_per_tok"]
    return in_experts * (experts - chosen) // experts


def _tensor_sizes(file: Path) -> dict[str, int]:
    """Elements by tensor of a safetensors file: its header is length-prefixed JSON."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    return {
        name: math.prod(tensor["shape"])
        for name, tensor in header.items()
        if name != "__metadata__"
    }
