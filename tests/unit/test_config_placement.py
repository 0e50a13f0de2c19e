"""``[placement]``: the planner's examples, what is refused and with which arithmetic."""

import json
from typing import Any

import pytest

from configs.checks import find_problems
from configs.memory import tiny_shape
from configs.placement_memory import gpu_memory
from configs.run import RunSpec
from configs.topology import Demand, topology, topology_problems

GIB = 1 << 30


def spec(**tables: Any) -> RunSpec:
    """A run of 4 samples an update with tables replaced key by key."""
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": "a",
        "model": {"source": "tiny", "tiny": {}},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 8, "eval_count": 2}]},
        "output": {"root": "/r"},
        "training": {"num_rollouts": 2, "rollout_batch_size": 24, "samples_per_prompt": 8},
        "inference": {"engine": "sglang"},
        "placement": {"mode": "disaggregated"},
    }
    for table, keys in tables.items():
        name = "async" if table == "asynchronous" else table
        document[name] = {**document.get(name, {}), **keys}
    return RunSpec.model_validate_json(json.dumps(document))


def problems(**tables: Any) -> list[str]:
    return [str(problem) for problem in find_problems(spec(**tables))]


@pytest.mark.parametrize(
    ("trainer", "rollout", "nodes"),
    [
        (4, 12, [(4, 4), (0, 8)]),
        (2, 16, [(2, 6), (0, 8), (0, 2)]),
        (8, 56, [(8, 0), *[(0, 8)] * 7]),
        (2, 4, [(2, 4)]),
    ],
)
def test_the_planner_lays_gpus_over_nodes_of_eight(
    trainer: int, rollout: int, nodes: list[tuple[int, int]]
) -> None:
    demand = Demand(trainer, rollout, given_capacity=8)
    assert not list(topology_problems(demand))
    plan = topology(demand)
    assert [(node.trainer_gpus, node.rollout_gpus) for node in plan.nodes] == nodes
    assert plan.replicas == len(nodes)
    assert plan.policy_gpus == trainer + rollout


def test_a_run_of_one_node_allocates_what_it_needs() -> None:
    document = topology(Demand(2, 4, given_capacity=8)).document()
    assert document["gpus_per_replica"] == document["allocated_gpus"] == 6
    assert document["unused_gpus"] == 0


def test_a_plan_is_told_in_a_line() -> None:
    plan = topology(Demand(4, 12, given_capacity=8))
    assert plan.summary() == "2 nodes of 8 GPUs: 4 trainer + 4 rollout, 8 rollout"
    shared = topology(Demand(2, 2, colocated=True))
    assert shared.summary() == "1 node of 2 GPUs: 2 trainer + 2 rollout (the same)"


def test_gpus_that_no_node_uses_are_counted() -> None:
    document = topology(Demand(2, 16, given_capacity=8)).document()
    assert (document["allocated_gpus"], document["unused_gpus"]) == (24, 6)


def test_engines_never_span_nodes() -> None:
    # (8 - 3) // 4 * 4 = 4 of the trainer's node, then 8 and 4 on nodes of their own.
    plan = topology(Demand(3, 16, tensor_parallel=4, given_capacity=8))
    assert [node.rollout_gpus for node in plan.nodes] == [4, 8, 4]
    assert sum(node.rollout_gpus for node in plan.nodes) == 16


def test_colocated_engines_add_no_gpus() -> None:
    plan = topology(Demand(4, 4, tensor_parallel=2, colocated=True, given_capacity=8))
    (node,) = plan.nodes
    assert (node.trainer_gpus, node.rollout_gpus, node.ray_gpus) == (4, 4, 4)
    assert plan.policy_gpus == plan.allocated_gpus == 4


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
@pytest.mark.parametrize("trainer", range(1, 9))
@pytest.mark.parametrize("engines", range(1, 12))
def test_every_gpu_is_placed_once_and_no_node_is_overfull(
    trainer: int, engines: int, tensor_parallel: int
) -> None:
    demand = Demand(trainer, engines * tensor_parallel, tensor_parallel, given_capacity=8)
    plan = topology(demand)
    assert sum(node.trainer_gpus for node in plan.nodes) == trainer
    assert sum(node.rollout_gpus for node in plan.nodes) == engines * tensor_parallel
    for node in plan.nodes:
        assert node.ray_gpus == node.trainer_gpus + node.rollout_gpus <= 8
        assert node.rollout_gpus % tensor_parallel == 0
    # A node further than needed is never opened.
    assert all(node.ray_gpus for node in plan.nodes)


def test_the_arithmetic_of_what_does_not_fit_is_shown() -> None:
    (too_many,) = problems(trainer={"num_processes": 12}, placement={"gpus_per_node": 8})
    assert too_many.startswith("trainer.num_processes = 12: needs 12 GPUs of one node")
    assert "12 > 8" in too_many
    (uneven,) = problems(
        inference={"tensor_parallel_size": 3, "num_engines": 4}, placement={"gpus_per_node": 8}
    )
    assert "8 % 3 = 2" in uneven
    assert uneven.endswith("use one of 1, 2, 4")
    (larger,) = problems(inference={"tensor_parallel_size": 16}, placement={"gpus_per_node": 8})
    assert "16 > 8" in larger


def test_colocated_engines_share_every_gpu_of_the_trainer() -> None:
    good: dict[str, Any] = {"trainer": {"num_processes": 4}, "placement": {"mode": "colocated"}}
    sound = {"tensor_parallel_size": 2, "num_engines": 2}
    assert problems(**good, inference=sound) == []
    (count,) = problems(**good, inference={"tensor_parallel_size": 2, "num_engines": 3})
    assert (
        "3 engines x inference.tensor_parallel_size 2 = 6 GPUs, trainer.num_processes = 4" in count
    )
    assert "use 2, or set trainer.num_processes = 6" in count
    (split,) = problems(**good, inference={"tensor_parallel_size": 3, "num_engines": 1})
    assert "4 % 3 = 1" in split


def test_who_takes_turns_does_not_sample_meanwhile() -> None:
    (free,) = problems(placement={"mode": "colocated"}, asynchronous={"fully_async": True})
    assert free.startswith('placement.mode = "colocated": takes turns')
    (ahead,) = problems(placement={"mode": "colocated"}, core={"max_policy_lag": 1})
    assert ahead.startswith("core.max_policy_lag = 1: must keep sampling and training apart")


def test_the_native_engine_has_no_gpu() -> None:
    native = {"engine": "native"}
    (own,) = problems(inference=native)
    assert "computes on the CPU only" in own
    assert problems(inference=native, placement={"mode": "colocated"}) == []
    assert spec(inference=native, placement={"mode": "colocated"}).gpu_demand is None
    (idle,) = problems(inference=native, placement={"mode": "cpu", "gpus_per_node": 8})
    assert idle.startswith("placement.gpus_per_node = 8: only a run that takes GPUs has that")


def test_a_background_evaluation_has_no_gpu_to_spare() -> None:
    (problem,) = problems(evaluation={"mode": "background", "interval": 1})
    assert problem.startswith('evaluation.mode = "background"')


def test_memory_of_one_gpu() -> None:
    run = spec(
        trainer={"num_processes": 2, "logprob_chunk_tokens": 1000},
        inference={"tensor_parallel_size": 2},
        core={"max_context_length": 500},
    )
    shape = tiny_shape(run.model.tiny)  # type: ignore[arg-type]
    need = gpu_memory(run, shape)
    assert need.engine_weights == shape.num_parameters  # 2 bytes over 2 GPUs
    heads = -(-shape.num_kv_heads // 2)
    assert need.engine_kv == 2 * shape.num_layers * heads * shape.head_dim * 2 * 500
    assert need.buckets == 2 * 2 * shape.num_parameters  # smaller than two buckets of 1 GiB
    assert need.serving == need.engine_weights + need.engine_kv + need.buckets
    assert need.training == need.trainer_states + need.trainer_work
    together = gpu_memory(
        run.model_copy(
            update={"placement": spec().placement.model_copy(update={"mode": "colocated"})}
        ),
        shape,
    )
    assert together.buckets == need.buckets // 2
    assert together.serving == need.serving - together.buckets + need.trainer_states


def test_what_does_not_fit_a_gpu_is_refused_with_the_sum() -> None:
    tiny = {"hidden_size": 1024, "num_layers": 64, "num_heads": 8, "num_kv_heads": 8}
    sized: dict[str, Any] = {"model": {"source": "tiny", "tiny": tiny}}
    assert problems(**sized, placement={"gpu_memory_gib": 80.0}) == []
    found = problems(**sized, placement={"gpu_memory_gib": 1.0})
    assert len(found) == 2
    trainer, engine = found
    assert "the trainer does not fit: states" in trainer
    assert "GiB a GPU; raise trainer.num_processes" in trainer
    assert "an engine does not fit: weights" in engine
    shape = tiny_shape(spec(**sized).model.tiny)  # type: ignore[arg-type]
    assert f"weights {2 * shape.num_parameters / GIB:.2f}" in engine


@pytest.mark.parametrize(
    ("tables", "transport"),
    [
        ({"placement": {"mode": "colocated"}}, "ipc"),
        ({}, "nccl"),
        ({"placement": {"mode": "cpu"}}, "disk"),
        ({"placement": {"mode": "cpu"}, "inference": {"engine": "native"}}, "disk"),
        ({"placement": {"mode": "colocated"}, "inference": {"engine": "native"}}, "disk"),
        ({"core": {"publication_mode": "rolling"}}, "disk"),
        ({"core": {"publication_transport": "disk"}}, "disk"),
    ],
)
def test_weights_travel_as_the_placement_allows(tables: dict[str, Any], transport: str) -> None:
    assert spec(**tables).publication_transport == transport


@pytest.mark.parametrize(
    ("transport", "tables", "reason"),
    [
        ("ipc", {}, 'cannot open the memory of the trainer\'s; use "nccl" or "auto"'),
        ("nccl", {"placement": {"mode": "colocated"}}, "does not connect two processes on one GPU"),
        (
            "nccl",
            {"placement": {"mode": "cpu"}, "inference": {"engine": "native"}},
            "the native engine takes no broadcast",
        ),
        (
            "nccl",
            {"core": {"publication_mode": "rolling"}, "asynchronous": {"fully_async": True}},
            "weights that wait for each engine in turn",
        ),
    ],
)
def test_a_transport_that_the_engines_cannot_use_is_refused(
    transport: str, tables: dict[str, Any], reason: str
) -> None:
    core = {**tables.get("core", {}), "publication_transport": transport}
    (problem,) = problems(**{**tables, "core": core})
    assert problem.startswith(f'core.publication_transport = "{transport}"')
    assert reason in problem
