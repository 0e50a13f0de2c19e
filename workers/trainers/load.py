"""Loading the policy for training: master weights in float32, checks that fail before work."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from configs.run import RunSpec
from configs.trainer_memory import chunk_tokens
from models.errors import ConfigurationError
from workers.engines.native.model_files import safetensor_files
from workers.sources.expert_names import FUSED_FAMILIES, file_weights
from workers.trainers.decoder_layers import compile_layers, recompute_layers
from workers.trainers.documents import Document, collate_documents
from workers.trainers.logprobs import Scorer
from workers.trainers.norms import fuse_norms
from workers.trainers.packing import Response, Row, collate
from workers.trainers.routing import Routing
from workers.trainers.row_layout import Packing, prepare_packing
from workers.trainers.sharded import ShardedBody

EXPERTS = {"cpu": "eager", "cuda": "grouped_mm"}
"""How transformers computes experts, by device. Measured: on CPU the loop over experts is as fast
in float32 and up to a quarter faster in bfloat16, in which the grouped product of float32 weights
does not compute; on an H200 the grouped product is 2 to 6 times faster."""
_PROBE_TOLERANCE = 1e-3  # nats in float32; a post-processed head is off by far more


def load_policy(spec: RunSpec, model_dir: Path) -> Any:
    """The model of ``model_dir`` in float32, ready to train, on the accelerator if there is one.

    Dropout stays off (evaluation mode): the log-probs of a response must not depend on the pass.

    Raises:
        ConfigurationError: the model cannot be trained with packed rows, or its export would have
            other tensor names than its own files.
    """
    if spec.core.max_context_length - 1 > spec.trainer.micro_batch_tokens:
        raise ConfigurationError(
            f"a sample of core.max_context_length = {spec.core.max_context_length} tokens does not "
            f"fit trainer.micro_batch_tokens = {spec.trainer.micro_batch_tokens}; raise the latter"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = load_model(model_dir, attention=attention_of(spec), experts=EXPERTS[device.type])
    except (ValueError, OSError, ImportError) as error:
        raise ConfigurationError(
            f"{model_dir} cannot be loaded with trainer.attention = {spec.trainer.attention!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    _refuse_other_names(model, model_dir)
    _refuse_short_windows(spec, model.config)
    model.to(device).eval().requires_grad_(True)
    _refuse_foreign_head(model, lambda: prepare_layers(spec, model))
    if spec.trainer.compile:
        compile_layers(model)
    if spec.trainer.activation_checkpointing:
        recompute_layers(model)
    return model


def prepare_layers(spec: RunSpec, model: Any) -> Packing:
    """Let a loaded ``model`` compute what the run feeds it; raises as ``prepare_packing``.

    On a CPU a norm by torch's kernel is as many operations as before.
    """
    packing = prepare_packing(spec, model)
    if next(model.parameters()).is_cuda and not spec.trainer.compile:
        fuse_norms(model)
    return packing


def attention_of(spec: RunSpec) -> str:
    """``trainer.attention`` by the name that transformers knows."""
    asked = spec.trainer.attention
    return "sdpa" if asked in ("flash", "flash4") else asked


def scorer_of(
    spec: RunSpec, model: Any, routing: Routing | None = None, body: ShardedBody | None = None
) -> Scorer:
    """How the run ``spec`` computes a loaded ``model``; see ``Scorer.of``."""
    on_gpu = model.get_output_embeddings().weight.is_cuda
    return Scorer.of(
        model,
        spec.inference.temperature,
        chunk_tokens(spec, on_gpu=on_gpu),
        getattr(torch, spec.trainer.compute_dtype),
        routing,
        body,
        spec.core.max_context_length if spec.trainer.compile else None,
    )


def load_model(
    model_dir: Path,
    attention: str = "eager",
    dtype: torch.dtype = torch.float32,
    experts: str = "eager",
) -> Any:
    """A causal LM from a local folder, quietly."""
    config = json.loads((model_dir / "config.json").read_text())
    chosen: dict[str, str] = {}
    if config.get("model_type") in FUSED_FAMILIES:  # some versions refuse it for dense models
        chosen["experts_implementation"] = experts
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=dtype,
        attn_implementation=attention,
        use_safetensors=True,
        local_files_only=True,
        **chosen,
    )


def describe_trainer(
    spec: RunSpec, model: Any, estimated_bytes: int, resident_bytes: int
) -> dict[str, Any]:
    """Data types, how layers are computed, and memory: expected at the peak, and seen by now."""
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "master_dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "optimizer_dtype": "float32",
        "compute_dtype": spec.trainer.compute_dtype,
        "inference_dtype": spec.inference.dtype,
        "attention": spec.trainer.attention,
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
        "activation_checkpointing": spec.trainer.activation_checkpointing,
        "compile": spec.trainer.compile,
        "estimated_bytes": estimated_bytes,
        "resident_bytes": resident_bytes,
    }


def _refuse_other_names(model: Any, model_dir: Path) -> None:
    """Engines know a model by the names in its files, and exports must use the same.

    transformers merges tensors of some families while it loads; ``expert_names`` undoes it for
    those it knows. Fused experts in the files themselves are fine: engines split those as well.
    """
    found: set[str] = set()
    for path in safetensor_files(model_dir):
        with safe_open(path, framework="pt") as file:
            found.update(file.keys())
    own, family = dict(model.named_parameters()), model.config.model_type
    fused = {name: tensor for name, tensor in own.items() if name in found}
    absent = sorted(file_weights(own, family).keys() - file_weights(fused, family).keys() - found)
    if absent:
        raise ConfigurationError(
            f"{model_dir}: {type(model).__name__} holds {len(absent)} tensors by other names than "
            f"its files ({', '.join(absent[:2])}), and their export could not be served; merged "
            f"tensors are split again for {', '.join(FUSED_FAMILIES)}; use a model of such a "
            "family or one that is not merged"
        )


def _refuse_short_windows(spec: RunSpec, config: Any) -> None:
    """One packed mask serves all layers, so a sliding window must not bite."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    sliding = getattr(config, "sliding_window", None)
    chunked = getattr(config, "attention_chunk_size", None)
    if layer_types:  # else a window that is set counts for every layer
        sliding = sliding if "sliding_attention" in layer_types else None
        chunked = chunked if "chunked_attention" in layer_types else None
    window = min((w for w in (sliding, chunked) if w is not None), default=None)
    if window is not None and spec.core.max_context_length > window:
        raise ConfigurationError(
            f"the model attends within windows of {window} tokens; core.max_context_length = "
            f"{spec.core.max_context_length} must not exceed that"
        )
    other = layer_types - {"full_attention", "sliding_attention", "chunked_attention"}
    if other:
        raise ConfigurationError(
            f"layers of type {sorted(other)} cannot compute packed rows (no attention mask)"
        )


def _refuse_foreign_head(model: Any, prepare: Callable[[], Packing]) -> None:
    """Compare packed scoring with the model's own logits on a probe of three short responses.

    ``prepare`` says how it is packed, and comes after the model's own logits.

    Catches models that scale or cap their logits after the output embeddings, and bodies that do
    not honor a four-dimensional mask.
    """
    size = model.get_output_embeddings().weight.shape[0]
    prompt, responses = _probe_ids(size)
    offsets = [0, 3, 5]
    device = model.get_output_embeddings().weight.device
    with torch.no_grad():
        plain = torch.cat([_plain_logprobs(model, prompt, r, device) for r in responses])
    placed = list(zip(responses, offsets, strict=True))
    if prepare() == "documents":
        probe = collate_documents([Document(prompt, r, o) for r, o in placed])
    else:
        probe = collate([Row(prompt, tuple(Response(r, o) for r, o in placed))])
    packed, _ = Scorer.of(model, 1.0, 16, torch.float32).score(probe)
    gap = float((packed - plain).abs().max())
    if not gap <= _PROBE_TOLERANCE:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be trained with packed rows: its own log-probs differ "
            f"by {gap:.3g} (logits post-processed after the head, or the 4-D mask is ignored)"
        )


def _probe_ids(vocabulary: int) -> tuple[list[int], list[list[int]]]:
    """Token ids spread over the vocabulary: a prompt of four and three responses."""
    ids = [(7919 * (i + 1)) % vocabulary for i in range(10)]
    return ids[:4], [ids[4:7], ids[7:9], ids[9:]]


def _plain_logprobs(
    model: Any, prompt: list[int], response: list[int], device: torch.device
) -> Tensor:
    """Log-probs [T] of ``response`` by an ordinary forward of one sequence."""
    ids = torch.tensor([prompt + response], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    targets = torch.tensor(response, device=device)
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
