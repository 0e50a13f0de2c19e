"""The engine's weights: fused tensors for speed, HF-named row views for loading and checksums."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from models.errors import ConfigurationError
from workers.engines.native.model_files import safetensor_files
from workers.engines.native.model_shape import ModelShape, MoeShape
from workers.fingerprint import fingerprints


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. E experts, H hidden, I intermediate; linear weights are [out, in]."""

    input_norm: torch.Tensor  # [H]
    post_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(heads + 2 kv heads) * head_dim, H]
    output: torch.Tensor  # [H, heads * head_dim]
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None  # [2I, H]
    gate_up_bias: torch.Tensor | None = None
    down: torch.Tensor | None = None  # [H, I]
    down_bias: torch.Tensor | None = None
    router: torch.Tensor | None = None  # [E, H]
    experts_gate_up: torch.Tensor | None = None  # [E, 2I, H]
    experts_down: torch.Tensor | None = None  # [E, H, I]


class WeightStore:
    """Every parameter of one model, allocated once and overwritten in place by updates."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.named: dict[str, torch.Tensor] = {}
        """HF name -> view of the live tensor. A tied head has no name of its own."""
        self.stacked: dict[str, tuple[torch.Tensor, list[str]]] = {}
        """Stacked expert name -> (tensor, the per-expert names that it stands for)."""
        self.embedding = self._new("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        self.layers = [self._layer(index) for index in range(shape.num_layers)]
        self.final_norm = self._new("model.norm.weight", shape.hidden_size)
        self.head = self.embedding
        if not shape.tied_head:
            self.head = self._new("lm_head.weight", shape.vocab_size, shape.hidden_size)
        found = map(torch.Tensor.untyped_storage, self.named.values())
        storages = {storage.data_ptr(): storage for storage in found}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]

    def load(self, folder: Path) -> None:
        """Overwrite all parameters from an HF folder's safetensors.

        Names and shapes of every file are checked first: on ConfigurationError nothing changed.
        """
        with ExitStack() as stack:
            sources: dict[str, Any] = {}
            for path in safetensor_files(folder):
                try:
                    opened = stack.enter_context(safe_open(str(path), framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise ConfigurationError(f"{path} cannot be read: {error}") from error
                sources.update(dict.fromkeys(opened.keys(), opened))
            plan = self._plan(folder, sources)
            for name, target in plan.items():
                target.copy_(sources[name].get_tensor(name))

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the parameters that ``tensors`` names; the others stay as they are.

        Names and shapes are checked first: on ConfigurationError nothing changed.
        """
        unknown = sorted(tensors.keys() - self.named.keys())
        if unknown:
            raise ConfigurationError(
                f"{len(unknown)} tensors are none of {self.shape.model_type}: {unknown[:3]}"
            )
        for name, tensor in tensors.items():
            if tensor.shape != self.named[name].shape:
                raise ConfigurationError(
                    f"{name} has shape {list(tensor.shape)}, the model needs "
                    f"{list(self.named[name].shape)}"
                )
        for name, tensor in tensors.items():
            self.named[name].copy_(tensor)

    def checksums(self) -> dict[str, str]:
        """HF name -> xxh3_64 (16 hex digits) over the live bytes of the tensor, row-major."""
        return {name: tensor_checksum(tensor) for name, tensor in self.named.items()}

    def fingerprints(self) -> dict[str, str]:
        """HF name -> fingerprint of the live bytes of the tensor, row-major."""
        return fingerprints(self.named.items())

    def free(self) -> None:
        """Give the memory of all parameters back; they must not be touched until ``allocate``."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Take the memory back. All parameters are zero until the next ``load``."""
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
        for view in self.named.values():
            view.zero_()

    def num_bytes(self) -> int:
        """Size of all parameters in bytes."""
        return sum(view.numel() * view.element_size() for view in self.named.values())

    def _plan(self, folder: Path, sources: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Source name -> target; raises ConfigurationError where names or shapes disagree."""
        plan = dict(self.named)
        for name, (tensor, parts) in self.stacked.items():
            if name in sources:
                for part in parts:
                    del plan[part]
                plan[name] = tensor
        ignored = {"lm_head.weight"} if self.shape.tied_head else set()
        missing = sorted(plan.keys() - sources.keys())
        unknown = sorted(
            name for name in sources.keys() - plan.keys() - ignored if "rotary_emb" not in name
        )
        if missing or unknown:
            raise ConfigurationError(
                f"{folder}: the tensors do not fit {self.shape.model_type}: {len(missing)} missing"
                f" {missing[:3]}, {len(unknown)} unknown {unknown[:3]}"
            )
        for name, target in plan.items():
            found = list(sources[name].get_slice(name).get_shape())
            if found != list(target.shape):
                raise ConfigurationError(
                    f"{folder}: {name} has shape {found}, the model needs {list(target.shape)}"
                )
        return plan

    def _new(self, name: str, *size: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=self.dtype)
        self.named[name] = tensor
        return tensor

    def _fused(
        self, prefix: str, parts: Mapping[str, int], suffix: str, *rest: int
    ) -> torch.Tensor:
        """One tensor whose consecutive row blocks carry the HF names of ``parts``."""
        tensor = torch.empty((sum(parts.values()), *rest), dtype=self.dtype)
        start = 0
        for part, rows in parts.items():
            self.named[f"{prefix}.{part}.{suffix}"] = tensor[start : start + rows]
            start += rows
        return tensor

    def _layer(self, index: int) -> LayerWeights:
        shape, prefix = self.shape, f"model.layers.{index}"
        width, attention = shape.hidden_size, f"{prefix}.self_attn"
        q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        qkv_rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        layer = LayerWeights(
            input_norm=self._new(f"{prefix}.input_layernorm.weight", width),
            post_norm=self._new(f"{prefix}.post_attention_layernorm.weight", width),
            qkv=self._fused(attention, qkv_rows, "weight", width),
            output=self._new(f"{attention}.o_proj.weight", width, q_rows),
        )
        if shape.qkv_bias:
            layer.qkv_bias = self._fused(attention, qkv_rows, "bias")
        if shape.output_bias:
            layer.output_bias = self._new(f"{attention}.o_proj.bias", width)
        if shape.qk_norm != "none":
            full = shape.qk_norm == "full"
            layer.q_norm = self._new(
                f"{attention}.q_norm.weight", q_rows if full else shape.head_dim
            )
            layer.k_norm = self._new(
                f"{attention}.k_norm.weight", kv_rows if full else shape.head_dim
            )
        if shape.moe and index in shape.moe.sparse_layers:
            self._experts(layer, shape.moe, f"{prefix}.mlp")
        else:
            self._dense(layer, f"{prefix}.mlp")
        return layer

    def _dense(self, layer: LayerWeights, prefix: str) -> None:
        shape = self.shape
        rows = {"gate_proj": shape.intermediate_size, "up_proj": shape.intermediate_size}
        layer.gate_up = self._fused(prefix, rows, "weight", shape.hidden_size)
        layer.down = self._new(
            f"{prefix}.down_proj.weight", shape.hidden_size, shape.intermediate_size
        )
        if shape.mlp_bias:
            layer.gate_up_bias = self._fused(prefix, rows, "bias")
            layer.down_bias = self._new(f"{prefix}.down_proj.bias", shape.hidden_size)

    def _experts(self, layer: LayerWeights, moe: MoeShape, prefix: str) -> None:
        width, size = self.shape.hidden_size, moe.intermediate_size
        layer.router = self._new(f"{prefix}.gate.weight", moe.num_experts, width)
        gate_up = torch.empty((moe.num_experts, 2 * size, width), dtype=self.dtype)
        down = torch.empty((moe.num_experts, width, size), dtype=self.dtype)
        gate_up_names, down_names = [], []
        for expert in range(moe.num_experts):
            name = f"{prefix}.experts.{expert}"
            self.named[f"{name}.gate_proj.weight"] = gate_up[expert, :size]
            self.named[f"{name}.up_proj.weight"] = gate_up[expert, size:]
            self.named[f"{name}.down_proj.weight"] = down[expert]
            gate_up_names += [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]
            down_names.append(f"{name}.down_proj.weight")
        self.stacked[f"{prefix}.experts.gate_up_proj"] = (gate_up, gate_up_names)
        self.stacked[f"{prefix}.experts.down_proj"] = (down, down_names)
        layer.experts_gate_up, layer.experts_down = gate_up, down


def tensor_checksum(tensor: torch.Tensor) -> str:
    """xxh3_64 of a tensor's bytes in row-major order, 16 hex digits."""
    # ``tensor.numpy()`` would pin the storage for good: it could not be freed any more.
    data = np.from_dlpack(tensor.contiguous().view(-1).view(torch.uint8)).data
    return xxhash.xxh3_64_hexdigest(data)
