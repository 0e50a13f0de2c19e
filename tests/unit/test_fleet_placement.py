"""Bundles of a run, what a cluster lacks, and which devices a process sees."""

from pathlib import Path

import pytest

from configs.run import RunSpec
from configs.topology import Demand
from models.errors import ConfigurationError, ContractViolation
from models.ids import RunRef
from tests.unit.test_config_placement import spec
from workers.actors.order import ActorOrder, environment
from workers.fleet.engines import shared_gpus
from workers.fleet.placement import engine_bundles, shortage, trainer_bundle
from workers.trainers.gang import private


def placed(mode: str, engines: int, parallel: int, processes: int = 4) -> RunSpec:
    return spec(
        placement={"mode": mode},
        inference={"num_engines": engines, "tensor_parallel_size": parallel},
        trainer={"num_processes": processes},
    )


def test_disaggregated_engines_have_bundles_of_their_gpus() -> None:
    run = placed("disaggregated", 3, 2)
    assert trainer_bundle(run) == {"CPU": 0.05, "GPU": 4}
    assert engine_bundles(run) == ({"CPU": 0.05, "GPU": 2},) * 3


def test_colocated_engines_lie_in_the_trainers_bundle() -> None:
    run = placed("colocated", 2, 2)
    assert trainer_bundle(run) == {"CPU": 0.15, "GPU": 4}
    assert engine_bundles(run) == ()


@pytest.mark.parametrize("mode", ["cpu", "colocated"])
def test_the_native_engine_takes_no_gpu(mode: str) -> None:
    run = spec(inference={"engine": "native", "num_engines": 2}, placement={"mode": mode})
    assert trainer_bundle(run) == {"CPU": 0.05}
    assert engine_bundles(run) == ({"CPU": 0.05},) * 2


def test_colocated_engines_use_consecutive_gpus_of_the_trainer() -> None:
    demand = Demand(4, 4, tensor_parallel=2, colocated=True)
    devices = ("1", "3", "5", "10")
    assert [shared_gpus(devices, rank, demand) for rank in (0, 1)] == [("1", "3"), ("5", "10")]
    with pytest.raises(ContractViolation, match="colocated engines share 4"):
        shared_gpus(("0", "1"), 0, demand)


def test_what_can_never_be_had_is_refused_with_the_sum() -> None:
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}]
    with pytest.raises(ConfigurationError, match=r"4 x 2 = 8 GPU are needed, the whole .* has 6"):
        shortage("engines", [{"CPU": 0.05, "GPU": 2.0}] * 4, nodes, {})
    with pytest.raises(ConfigurationError, match=r"5 GPU are needed on one node, the largest .* 4"):
        shortage("trainer", [{"CPU": 0.05, "GPU": 5.0}], nodes, {})
    with pytest.raises(ConfigurationError, match=r"has 0: lower trainer\.num_processes"):
        shortage("trainer", [{"GPU": 1.0}], [{"CPU": 2.0}], {})


def test_a_run_does_not_wait_for_what_it_holds_itself() -> None:
    """One GPU for the trainer and one for the engine: a cluster of one would never have both."""
    run = placed("disaggregated", 1, 1, processes=1)
    nodes, free = [{"CPU": 8.0, "GPU": 1.0}], {"CPU": 7.9}
    engines, trainer = engine_bundles(run), (trainer_bundle(run),)
    needed = r"1 GPU are needed beside 1 for the rest of the run, the whole Ray cluster has 1"
    for bundles, beside in ((engines, trainer), (trainer, engines)):
        with pytest.raises(ConfigurationError, match=needed):
            shortage("group", bundles, nodes, free, beside)
    two = [{"CPU": 8.0, "GPU": 1.0}] * 2
    missing = shortage("group", engines, two, free, trainer)
    assert missing == "needs 0.05 CPU, free are 7.9; needs 1 GPU, free are 0"


def test_what_others_hold_is_told() -> None:
    bundles = [{"CPU": 0.05, "GPU": 2.0}] * 2
    missing = shortage("engines", bundles, [{"CPU": 8.0, "GPU": 8.0}], {"CPU": 7.0, "GPU": 1.0})
    assert missing == "needs 0.1 CPU, free are 7; needs 4 GPU, free are 1"


def test_a_process_without_gpus_sees_none(tmp_path: Path) -> None:
    run = RunRef(run_id="train/a", root=str(tmp_path), spec_sha256="0")
    order = ActorOrder(run=run, role="engine", scratch=str(tmp_path))
    plain = environment(order, spec(), 1)
    assert plain["CUDA_VISIBLE_DEVICES"] == ""
    assert "NCCL_CUMEM_ENABLE" not in plain
    shared = environment(order.model_copy(update={"gpus": ("2", "3")}), spec(), 1)
    assert shared["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert (shared["NCCL_CUMEM_ENABLE"], shared["NCCL_NVLS_ENABLE"]) == ("0", "0")


def test_every_process_has_a_cache_of_model_code_of_its_own(tmp_path: Path) -> None:
    run = RunRef(run_id="train/a", root=str(tmp_path), spec_sha256="0")
    orders = [
        ActorOrder(run=run, role=role, rank=rank, scratch=str(tmp_path))
        for role, rank in (("trainer", 0), ("engine", 0), ("engine", 1), ("engine", 1))
    ]
    caches = [environment(order, spec(), 1)["HF_MODULES_CACHE"] for order in orders]
    caches += [
        private({"HF_MODULES_CACHE": caches[0]}, rank)["HF_MODULES_CACHE"] for rank in (1, 2)
    ]

    assert len(set(caches)) == 6
    assert all(Path(cache).parent == tmp_path for cache in caches)
    assert private({"A": "1"}, 1) == {"A": "1"}
