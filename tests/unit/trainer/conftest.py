"""Small models, run files and collections for the trainer's tests."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from configs.run import RunSpec
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.sources.characters import character_tokenizer

VOCABULARY = 100

MakeSpec = Callable[..., RunSpec]
MakeGroups = Callable[..., list[SampleGroup]]
MakeModel = Callable[[str], Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model() -> MakeModel:
    """A random causal LM of two layers; weights large enough for log-probs to differ visibly."""

    def make(family: str) -> Any:
        torch.manual_seed(3)
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if family == "llama":
            return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **sizes)).eval()
        return Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **sizes)).eval()

    return make


@pytest.fixture
def make_mixture() -> MakeModel:
    """A random mixture of five experts, two a token; in qwen3_moe the second of three layers is
    dense, and weights are divided by their sum; in olmoe neither."""

    def make(family: str) -> Any:
        torch.manual_seed(3)
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if family == "olmoe":
            config: Any = OlmoeConfig(norm_topk_prob=False, **sizes)
        else:
            extra: dict[str, Any] = {"moe_intermediate_size": 16, "mlp_only_layers": [1]}
            config = Qwen3MoeConfig(head_dim=8, norm_topk_prob=True, **extra, **sizes)
        config._experts_implementation = "eager"
        return AutoModelForCausalLM.from_config(config).float().eval()

    return make


@pytest.fixture
def mixture_dir(tmp_path: Path, make_mixture: MakeModel) -> Path:
    """A Hugging Face folder of the random Qwen3-MoE with the character tokenizer."""
    folder = tmp_path / "mixture"
    make_mixture("qwen3_moe").save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model_dir(tmp_path: Path, make_model: MakeModel) -> Path:
    """A Hugging Face folder of the random Qwen3 with the character tokenizer."""
    folder = tmp_path / "model"
    make_model("qwen3").save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def make_spec(tmp_path: Path) -> MakeSpec:
    """A run file of two groups of four samples; sections can be overridden."""

    def make(**sections: dict[str, Any]) -> RunSpec:
        data: dict[str, Any] = {
            "schema_version": 1,
            "name": "unit",
            "model": {"source": "tiny"},
            "data": {"prompt_data": "train.jsonl", "seed": 5},
            "output": {"root": str(tmp_path / "root")},
            "training": {
                "num_rollouts": 4,
                "rollout_batch_size": 2,
                "samples_per_prompt": 4,
                "use_tis": True,
            },
            "optimizer": {"learning_rate": 1e-2},
            "core": {"max_policy_lag": 8, "max_context_length": 16},
            "trainer": {"num_threads": 1},
            "inference": {"dtype": "float32", "max_response_length": 8},
        }
        for name, section in sections.items():
            data[name] = {**data.get(name, {}), **section}
        return RunSpec.model_validate(data)

    return make


@pytest.fixture
def make_groups() -> MakeGroups:
    """Random groups; lengths of responses cycle through 1..8."""

    def make(
        seed: int = 0,
        num_groups: int = 2,
        size: int = 4,
        version: int = 0,
        advantages: list[list[float]] | None = None,
    ) -> list[SampleGroup]:
        rng = random.Random(seed)
        groups = []
        for g in range(num_groups):
            prompt = [rng.randrange(4, VOCABULARY) for _ in range(rng.randrange(2, 9))]
            samples = []
            for s in range(size):
                length = 1 + (g * size + s) % 8
                samples.append(
                    Sample(
                        sample_index=g * size + s,
                        group_index=g,
                        prompt_token_ids=prompt,
                        response_token_ids=[rng.randrange(4, VOCABULARY) for _ in range(length)],
                        logprobs=[-rng.uniform(3.0, 6.0) for _ in range(length)],
                        spans=[TokenSpan(version, 0, length)],
                        finish_reason=FinishReason.STOP,
                    )
                )
            if advantages is None:
                rewards = [1.0] + [float(rng.random() < 0.5) for _ in range(size - 2)] + [0.0]
                mean = sum(rewards) / size
                own = [reward - mean for reward in rewards]
            else:
                own = advantages[g]
            groups.append(SampleGroup(g, f"p{g}", 0, samples, own))
        return groups

    return make


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Two processes, started when first asked for."""
    pool = RankPool(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
