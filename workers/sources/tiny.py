"""A tiny model made on the spot and warmed up by supervised batches of a generated task.

The warm-up stops at the first check whose sampled accuracy reaches the goal: the jump from nothing
to something is steep and its batch varies with the seed, so a batch count would not do.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from configs.model import TinyExperts, TinySpec
from models.errors import ConfigurationError
from workers.sources.characters import BOS_ID, EOS_ID, PAD_ID, character_tokenizer
from workers.sources.expert_names import file_weights
from workers.sources.tasks import Question
from workers.sources.tensor_file import write_tensors

BATCH_SIZE = 64
CHECK_SIZE = 256
_RATE_WARMUP = 20  # batches of linear learning-rate warm-up; no check before their end
_WEIGHT_DECAY = 0.01
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class TinyReport:
    """How the warm-up went."""

    num_parameters: int
    batches: int
    accuracy: float


def questions_needed(tiny: TinySpec) -> int:
    """Training questions that the longest possible warm-up takes, its checks included."""
    return BATCH_SIZE * tiny.warmup_max_batches + CHECK_SIZE


def make_tiny_model(out_dir: Path, tiny: TinySpec, questions: Sequence[Question]) -> TinyReport:
    """Write a Hugging Face folder of a warmed-up tiny model into the existing ``out_dir``.

    Args:
        out_dir: An existing folder.
        tiny: Sizes, seed, and the goal of the warm-up.
        questions: Training questions only; the first ``CHECK_SIZE`` measure accuracy, batches are
            drawn from all of them. May be empty when there is no warm-up.

    Raises:
        ConfigurationError: sizes that do not fit, or the accuracy was not reached.
    """
    tokenizer = character_tokenizer(tiny.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        model = _new_model(tiny)
        batches, accuracy = 0, 0.0
        if tiny.warmup_accuracy > 0:
            batches, accuracy = _warm_up(model, tokenizer, tiny, questions)
    model.config.dtype = torch.float32
    model.config.save_pretrained(out_dir)
    _stop_at_eos().save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    weights = file_weights(dict(model.named_parameters()), model.config.model_type)
    write_tensors(out_dir / "model.safetensors", weights)
    return TinyReport(sum(p.numel() for p in model.parameters()), batches, accuracy)


def _new_model(tiny: TinySpec) -> Any:
    """A randomly initialized model of ``tiny.architecture``."""
    divides = tiny.head_dim is not None or tiny.hidden_size % tiny.num_heads == 0
    if not divides or tiny.num_heads % tiny.num_kv_heads:
        raise ConfigurationError(
            f"model.tiny: hidden_size {tiny.hidden_size} must be a multiple of num_heads "
            f"{tiny.num_heads}, and that a multiple of num_kv_heads {tiny.num_kv_heads}"
        )
    sizes: dict[str, Any] = {
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "max_position_embeddings": tiny.max_positions,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    if tiny.experts is None:
        return _dense(sizes, tiny).eval()
    return _mixture(sizes, tiny, tiny.experts).eval()


def _dense(sizes: dict[str, Any], tiny: TinySpec) -> Any:
    """A Qwen3 with tied embeddings."""
    config = Qwen3Config(
        intermediate_size=tiny.inner_size,
        head_dim=tiny.head_size,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        **sizes,
    )
    return Qwen3ForCausalLM(config)


def _mixture(sizes: dict[str, Any], tiny: TinySpec, experts: TinyExperts) -> Any:
    """A mixture of experts in every layer with a head of its own.

    As in the published models, Qwen3-MoE renormalizes the weights of the chosen experts and OLMoE
    does not. SGLang cannot serve a Qwen3-MoE with a tied head.
    """
    mixture: dict[str, Any] = {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "tie_word_embeddings": False,
        **sizes,
    }
    if tiny.architecture == "olmoe":
        return OlmoeForCausalLM(
            OlmoeConfig(
                intermediate_size=experts.moe_intermediate_size,
                norm_topk_prob=False,
                architectures=["OlmoeForCausalLM"],
                **mixture,
            )
        )
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            intermediate_size=tiny.inner_size,
            moe_intermediate_size=experts.moe_intermediate_size,
            head_dim=tiny.head_size,
            norm_topk_prob=True,
            architectures=["Qwen3MoeForCausalLM"],
            **mixture,
        )
    )


def _warm_up(
    model: Any, tokenizer: Any, tiny: TinySpec, questions: Sequence[Question]
) -> tuple[int, float]:
    """Supervised batches until the accuracy is reached; returns (batches, accuracy)."""
    if not questions or not all(question.answer for question in questions):
        raise ConfigurationError(
            "model.tiny.warmup_accuracy needs a first data task whose questions have one right "
            "answer each; set it to 0 for a random model"
        )
    pairs = [_encode(tokenizer, question) for question in questions]
    rng = random.Random(f"warm-up:{tiny.seed}")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=tiny.warmup_learning_rate,
        betas=(0.9, 0.95),
        weight_decay=_WEIGHT_DECAY,
        fused=True,
    )
    accuracy = 0.0
    for batch in range(1, tiny.warmup_max_batches + 1):
        rate = tiny.warmup_learning_rate * min(1.0, batch / _RATE_WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = rate
        _supervised_step(model, optimizer, rng.choices(pairs, k=BATCH_SIZE))
        if batch >= _RATE_WARMUP and batch % tiny.warmup_check_batches == 0:
            accuracy = sampled_accuracy(model, pairs[:CHECK_SIZE])
            if accuracy >= tiny.warmup_accuracy:
                return batch, accuracy
    raise ConfigurationError(
        f"the tiny model reached an accuracy of {accuracy:.3f} after "
        f"{tiny.warmup_max_batches} batches, model.tiny.warmup_accuracy asks for "
        f"{tiny.warmup_accuracy}; raise warmup_max_batches or the model's size"
    )


def _encode(tokenizer: Any, question: Question) -> tuple[list[int], list[int]]:
    """(prompt ids, answer ids): BOS + question, answer + EOS."""
    prompt = tokenizer.encode(question.question, add_special_tokens=False)
    answer = tokenizer.encode(question.answer, add_special_tokens=False)
    return [BOS_ID, *prompt], [*answer, EOS_ID]


def _supervised_step(
    model: Any, optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[list[int], list[int]]]
) -> None:
    """One step on the cross-entropy of the answers."""
    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), length), PAD_ID)
    labels = torch.full((len(pairs), length), _IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    logits = model(input_ids=ids, use_cache=False).logits  # padding is on the right: causal
    loss = cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def sampled_accuracy(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    """Share of answers that one sample at temperature 1 gets exactly right."""
    width = max(len(prompt) for prompt, _ in pairs)
    ids = torch.full((len(pairs), width), PAD_ID)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(pairs):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    longest = max(len(answer) for _, answer in pairs)
    settings = _stop_at_eos(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest
    )
    output: Tensor = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    right = 0
    for row, (_, answer) in zip(output[:, width:].tolist(), pairs, strict=True):
        right += row[: len(answer)] == answer
    return right / len(pairs)


def _stop_at_eos(**settings: Any) -> GenerationConfig:
    return GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, **settings
    )
