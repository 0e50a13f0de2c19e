"""Models that SGLang refuses to cut or to serve are refused by the run file, with the numbers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from configs.checks import find_problems
from configs.run import RunSpec
from configs.sglang_arguments import RESERVED
from configs.sglang_model_checks import cut_reasons, problems_of_cut
from models.errors import ConfigurationError
from workers.sources.model import require_usable

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
}
SMOLLM2 = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


def spec(model: dict[str, Any], **inference: Any) -> RunSpec:
    parallel = inference.get("tensor_parallel_size", 1)
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": "a",
        "model": model,
        "data": {"tasks": [{"task": "reverse_word", "train_count": 8}]},
        "output": {"root": "/r"},
        "training": {"num_rollouts": 2, "rollout_batch_size": 24, "samples_per_prompt": 8},
        "inference": {"engine": "sglang", **inference},
        "placement": {"mode": "disaggregated", "gpus_per_node": parallel + 1},
    }
    return RunSpec.model_validate_json(json.dumps(document))


def problems(tiny: dict[str, Any], **inference: Any) -> list[str]:
    run = spec({"source": "tiny", "tiny": tiny}, **inference)
    return [str(problem) for problem in find_problems(run)]


@pytest.mark.parametrize(
    ("tiny", "parallel", "reason"),
    [
        ({}, 3, "4 heads % 3 = 1; 512 inner width % 3 = 2; 128 rows of vocabulary, padded % 3 = 2"),
        ({"intermediate_size": 511}, 2, "511 inner width % 2 = 1"),
        (
            {"num_heads": 12, "num_kv_heads": 4, "hidden_size": 192, "vocab_size": 192},
            6,
            "6 % 4 key-value heads = 2",
        ),
        (
            {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 192, "vocab_size": 192},
            2,
            "3 key-value heads % 2 = 1",
        ),
        (
            {"architecture": "qwen3_moe", "moe_intermediate_size": 90},
            4,
            "90 inner width of an expert % 4 = 2",
        ),
        ({"architecture": "qwen3_moe", "num_experts": 2}, 4, "2 experts < 4"),
        (
            {"architecture": "olmoe", "num_kv_heads": 4},
            2,
            "it normalizes queries and keys of OLMoE",
        ),
    ],
)
def test_a_tiny_model_that_does_not_come_out_even(
    tiny: dict[str, Any], parallel: int, reason: str
) -> None:
    (found,) = problems(tiny, tensor_parallel_size=parallel)
    start = f"inference.tensor_parallel_size = {parallel}: SGLang cannot cut the model over"
    assert found.startswith(f"{start} {parallel} GPUs: {reason}")


@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("tiny", [{}, {"num_kv_heads": 1}, {"architecture": "qwen3_moe"}])
def test_a_tiny_model_that_does(tiny: dict[str, Any], parallel: int) -> None:
    assert problems(tiny, tensor_parallel_size=parallel) == []


def test_sizes_of_published_models() -> None:
    assert [n for n in range(1, 33) if not cut_reasons(QWEN3_MOE, n)] == [1, 2, 4, 8, 16, 32]
    (found,) = problems_of_cut(SMOLLM2, 2)
    assert found.remedy == "use one of 1, 3"
    assert "9 heads % 2 = 1; 3 key-value heads % 2 = 1" in found.reason
    dense_too = QWEN3_MOE | {"mlp_only_layers": [0], "intermediate_size": 6147}
    assert cut_reasons(dense_too, 2) == ["6147 inner width % 2 = 1"]
    assert cut_reasons(QWEN3_MOE | {"intermediate_size": 6147}, 2) == []


def test_a_folder_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    run = spec({"source": str(tmp_path)}, tensor_parallel_size=2)
    (found,) = find_problems(run)
    assert "9 heads % 2 = 1" in str(found)
    # What was not here when the run file was checked is refused before anything starts.
    with pytest.raises(ConfigurationError, match=r"config\.json: inference\.tensor_parallel_size"):
        require_usable(run, tmp_path)
    for text in ("{", "[]", '{"num_attention_heads": "nine"}'):
        (tmp_path / "config.json").write_text(text)
        assert find_problems(run) == []


def test_olmoe_needs_every_key_value_head() -> None:
    (found,) = problems({"architecture": "olmoe"})
    assert found == (
        "model.tiny.num_kv_heads = 2: SGLang serves OLMoE only with as many key-value heads as "
        "heads: 2 of 4; use 4 key-value heads, or another engine"
    )
    assert problems({"architecture": "olmoe", "num_kv_heads": 4}) == []


@pytest.mark.parametrize(
    "name", ["pp_size", "pipeline_parallel_size", "ep_size", "moe_dense_tp_size", "attn_cp_size"]
)
def test_other_ways_to_spread_a_model_are_refused_by_name(name: str) -> None:
    (found,) = problems({}, sglang={name: 2})
    assert found.startswith(f"inference.sglang.{name} = 2: ")
    assert re.search(r"cannot be confirmed; .*inference\.tensor_parallel_size", found)
    assert name in RESERVED
