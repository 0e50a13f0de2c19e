"""Who asks for routes: engines are started with them and sampled with them under replay only."""

from pathlib import Path
from typing import Any

import pytest

from activities.rollout.plans import evaluation_plan, training_plan
from configs.run import RunSpec
from models.ids import RunRef
from workers.actors.engine import server_command
from workers.actors.order import ActorOrder

FLAG = "--enable-return-routed-experts"


def spec(replay: bool) -> RunSpec:
    data: dict[str, Any] = {
        "schema_version": 1,
        "name": "unit",
        "model": {"source": "tiny", "tiny": {"architecture": "qwen3_moe", "warmup_accuracy": 0.0}},
        "data": {"prompt_data": "train.jsonl"},
        "output": {"root": "root"},
        "training": {"use_rollout_routing_replay": replay},
    }
    return RunSpec.model_validate(data)


def order(root: Path) -> ActorOrder:
    run = RunRef(run_id="train/unit", root=str(root), spec_sha256="s")
    return ActorOrder(run=run, role="engine", scratch=str(root))


@pytest.mark.parametrize("replay", [False, True])
def test_training_asks_for_routes_under_replay_and_evaluation_never(replay: bool) -> None:
    assert training_plan(spec(replay)).routed_experts is replay
    assert evaluation_plan(spec(replay)).routed_experts is False


@pytest.mark.parametrize("replay", [False, True])
def test_engines_return_routes_under_replay_and_evaluating_ones_never(
    tmp_path: Path, replay: bool
) -> None:
    assert (FLAG in server_command(order(tmp_path), spec(replay)).argv) is replay
    assert FLAG not in server_command(order(tmp_path), spec(replay), tmp_path, 3).argv
