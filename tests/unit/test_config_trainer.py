"""What the attention kernel for documents needs, and which layout follows from it."""

import json
from typing import Any

import pytest

from configs.checks import find_problems
from configs.run import RunSpec

ON_GPUS = {"inference": {"engine": "sglang"}, "placement": {"mode": "disaggregated"}}
FAST = {"compute_dtype": "bfloat16", "attention": "flash", "compile": True}


def spec(trainer: dict[str, Any], **tables: Any) -> RunSpec:
    """A run on GPUs, unless ``tables`` say otherwise."""
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": "a",
        "model": {"source": "tiny", "tiny": {}},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 8, "eval_count": 2}]},
        "output": {"root": "/r"},
        "training": {"num_rollouts": 2, "rollout_batch_size": 4, "samples_per_prompt": 4},
        "trainer": trainer,
        **ON_GPUS,
        **tables,
    }
    return RunSpec.model_validate_json(json.dumps(document))


def test_what_is_there_on_gpus_is_accepted() -> None:
    for trainer in (FAST, {**FAST, "packing": "documents"}, {**FAST, "attention": "sdpa"}):
        assert not find_problems(spec(trainer))
    assert not find_problems(spec({"activation_checkpointing": True}, inference={}, placement={}))


@pytest.mark.parametrize(
    ("trainer", "tables", "key", "part"),
    [
        ({"compute_dtype": "bfloat16", "compile": True}, {"placement": {}}, "compile", "GPUs only"),
        ({"attention": "flash"}, {}, "attention", "trainer.compute_dtype is 'float32'"),
        ({"attention": "flash4"}, {}, "attention", "trainer.compute_dtype is 'float32'"),
        ({"compile": True}, {}, "compile", "trainer.compute_dtype is 'float32'"),
        ({**FAST, "packing": "shared_prompt"}, {}, "compile", "rows that share a prompt"),
        ({**FAST, "packing": "shared_prompt"}, {}, "attention", "rows that share a prompt"),
        ({**FAST, "attention": "eager"}, {}, "compile", "attention 'eager' does not take"),
        (
            FAST,
            {"model": {"source": "tiny", "tiny": {"architecture": "qwen3_moe"}}},
            "compile",
            "dense models",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    trainer: dict[str, Any], tables: dict[str, Any], key: str, part: str
) -> None:
    found = [str(problem) for problem in find_problems(spec(trainer, **tables))]
    assert any(text.startswith(f"trainer.{key} =") and part in text for text in found), found


def test_documents_are_the_layout_where_the_kernel_is() -> None:
    assert spec({"compute_dtype": "bfloat16"}).packing == "documents"
    assert spec({"compute_dtype": "bfloat16", "attention": "eager"}).packing == "shared_prompt"
    assert spec({"compute_dtype": "float32"}).packing == "shared_prompt"
    on_cpu = {"inference": {}, "placement": {}}
    assert spec({"compute_dtype": "bfloat16"}, **on_cpu).packing == "shared_prompt"
    asked = {"compute_dtype": "bfloat16", "packing": "shared_prompt"}
    assert spec(asked).packing == "shared_prompt"
