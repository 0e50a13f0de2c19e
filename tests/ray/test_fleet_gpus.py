"""GPUs as the cluster counts them: who holds which, who waits, who is refused. No GPU computes."""

import asyncio
import importlib.util
from typing import Any

import psutil
import pytest
from fleet_rig import Run, statuses

from models.errors import ConfigurationError, ServiceUnreachable
from workers.fleet import RayFleet, placement

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is not None,
        reason="SGLang is installed: it would start on GPUs that are only counted here",
    ),
]


def sections(mode: str, processes: int, engines: int) -> dict[str, dict[str, Any]]:
    return {
        "placement": {"mode": mode},
        "trainer": {"num_processes": processes},
        "inference": {"engine": "sglang", "num_engines": engines},
    }


def variable(pid: int, name: str) -> str | None:
    """What a process was started with."""
    return psutil.Process(pid).environ().get(name)


def free_gpus() -> float:
    """GPUs that no placement group holds."""
    import ray

    return float(ray.available_resources().get("GPU", 0))


async def bring_up(fleet: RayFleet, run: Run) -> dict[str, tuple[str, ...]]:
    """Place the run; its engines then miss SGLang. Name -> GPUs of every actor."""
    with pytest.raises(ConfigurationError, match="SGLang"):
        await fleet.prepare(run.token(), run.request())
    return {name: row.gpus for name, row in (await statuses(fleet, run)).items()}


async def place_trainer(fleet: RayFleet, run: Run, timeout_s: float) -> None:
    """Hold the GPUs of the run's trainer, as its start does, without a process on them."""
    bundles = (placement.trainer_bundle(run.spec),)
    await placement.place(fleet._cluster, run.ref.run_id, "trainer", bundles, timeout_s)


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
async def test_every_process_sees_its_own_gpus(fleet: RayFleet, make_run, mode: str):
    run: Run = make_run(**sections(mode, processes=2, engines=2))
    gpus = await bring_up(fleet, run)

    trainer = gpus["trainer"]
    assert len(trainer) == 2
    engines = (gpus["engine-0"], gpus["engine-1"])
    if mode == "colocated":
        assert engines == (trainer[:1], trainer[1:])
        assert free_gpus() == 2
    else:
        assert sorted(each for found in (trainer, *engines) for each in found) == list("0123")
        assert free_gpus() == 0
    assert not gpus.get("producer")
    # The trainer's second rank is a child that was started with the trainer's environment.
    actor = (await statuses(fleet, run))["trainer"].pid
    ranks = [child.pid for child in psutil.Process(actor).children()]
    assert [variable(pid, "CUDA_VISIBLE_DEVICES") for pid in ranks] == [",".join(trainer)]
    assert [variable(pid, "NCCL_CUMEM_ENABLE") for pid in ranks] == ["0"]


async def test_a_run_without_gpus_sees_none(fleet: RayFleet, make_run):
    run: Run = make_run()
    await fleet.prepare(run.token(), run.request())
    found = await statuses(fleet, run)
    assert not any(row.gpus for row in found.values())
    assert variable(found["engine-0"].pid, "CUDA_VISIBLE_DEVICES") == ""
    assert free_gpus() == 4


async def test_gpus_that_others_hold_are_waited_for(fleet: RayFleet, make_run):
    holder: Run = make_run(**sections("colocated", processes=4, engines=4))
    await place_trainer(fleet, holder, 20.0)
    run: Run = make_run(**sections("colocated", 1, 1))
    with pytest.raises(ServiceUnreachable, match="needs 1 GPU, free are 0; end other runs"):
        await place_trainer(fleet, run, 0.2)
    waiting = asyncio.create_task(bring_up(fleet, run))
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done
    await fleet.teardown(holder.ref)
    assert len((await waiting)["trainer"]) == 1


async def test_gpus_that_nobody_has_are_refused(fleet: RayFleet, make_run, monkeypatch):
    monkeypatch.setattr(placement, "WARN_EVERY_S", 0.5)  # seconds until it looks what is missing
    run: Run = make_run(**sections("disaggregated", 8, 1))
    with pytest.raises(ConfigurationError, match=r"1 x 8 = 8 GPU are needed, .* cluster has 4"):
        await fleet.prepare(run.token(), run.request())
