"""A GGUF file of the llama family -> a Hugging Face folder in bfloat16.

Two things differ between the formats. llama.cpp stores the rows of the query and key projections
interleaved for its rotary embedding; they are put back in the half-split order of transformers.
And the tokenizer is a table of tokens and merges, from which a byte-level BPE is rebuilt with the
pre-tokenizer that the file names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from models.errors import ConfigurationError
from workers.sources.tensor_file import write_tensors

CONVERSION = "gguf-llama-bfloat16-1"
"""Part of the model's identity; raise the number when the output of this module changes."""

_CONTROL_TOKEN = 3  # gguf's TokenType.CONTROL
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model in ``source`` into the existing ``folder``.

    Raises:
        ConfigurationError: another architecture or pre-tokenizer, or a tensor without a place.
    """
    reader = GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ConfigurationError(
            f"{source}: architecture {fields.get('general.architecture')!r} cannot be converted, "
            "only 'llama' can; use a Hugging Face folder instead"
        )
    tensors = dict(_tensors(reader, fields, source))
    write_tensors(folder / "model.safetensors", tensors)
    tied = "lm_head.weight" not in tensors
    _config(fields, tied=tied).save_pretrained(folder)
    GenerationConfig(**_special_ids(fields)).save_pretrained(folder)
    _tokenizer(fields, source).save_pretrained(folder)


def _tensors(
    reader: GGUFReader, fields: dict[str, Any], source: Path
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, bfloat16 tensor) of every tensor of the file."""
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = _GLOBAL.get(tensor.name)
        if name is None:
            parts = tensor.name.split(".")
            if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER:
                raise ConfigurationError(f"{source}: tensor {tensor.name!r} has no known place")
            name = f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
            if parts[2] in heads:
                values = _half_split(values, heads[parts[2]])
        yield name, torch.from_numpy(np.array(values, order="C")).to(torch.bfloat16)


def _half_split(weight: Any, num_heads: int) -> Any:
    """Rows of each head from interleaved pairs (0, h/2, 1, h/2 + 1, ...) to (0, 1, ..., h - 1)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], *, tied: bool) -> LlamaConfig:
    num_heads = fields["llama.attention.head_count"]
    theta = float(fields["llama.rope.freq_base"])
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields.get("llama.vocab_size", len(fields["tokenizer.ggml.tokens"])),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // num_heads,
        max_position_embeddings=fields["llama.context_length"],
        # stored as float32: 9.9999997e-06 stands for 1e-05
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **_special_ids(fields),
    )


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Ids of the special tokens under the names of transformers' configurations."""
    return {
        f"{ours}_token_id": fields[f"tokenizer.ggml.{theirs}_token_id"]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"tokenizer.ggml.{theirs}_token_id" in fields
    }


def _tokenizer(fields: dict[str, Any], source: Path) -> Any:
    """The byte-level BPE of the file, with its chat template."""
    if fields.get("tokenizer.ggml.pre") != "smollm":
        raise ConfigurationError(
            f"{source}: pre-tokenizer {fields.get('tokenizer.ggml.pre')!r} is not known, only "
            "'smollm' is; use a Hugging Face folder instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    core.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    special = {
        f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("pad", "padding"),
            ("unk", "unknown"),
        )
        if f"tokenizer.ggml.{theirs}_token_id" in fields
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=fields["llama.context_length"],
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )
