"""A tiny mixture of experts with random weights and a byte-level tokenizer, as a model folder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from workers.engines.native.model_shape import read_model_shape
from workers.engines.native.weights import WeightStore

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""SGLang leaves the head of this architecture untied, whatever the checkpoint says."""
GPU_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 128,
}
"""The smallest sizes that the kernels of a GPU engine take."""
PROMPT = [1, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def write_engine_model(folder: Path, seed: int, **changed: Any) -> Path:
    """Write config, weights [float32] and tokenizer; ``changed`` are other config values."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    store = WeightStore(read_model_shape(folder), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(view.shape, generator=generator) * 0.3 + (view.ndim == 1)
        for name, view in store.named.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    names = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    told = SPECIAL | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
