"""GPUs as the cluster counts them: who holds which, who waits, who is refused. No GPU computes."""

import asyncio
import importlib.util
import socket
from typing import Any

import psutil
import pytest
from fleet_rig import Run, statuses

from activities.storage import layout
from models.errors import ConfigurationError, ServiceUnreachable
from workers.cli.status_attempts import attempts_of
from workers.cli.status_details import from_files
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


async def ranks_of(run: Run) -> list[dict[str, Any]]:
    """The trainer's rows of ``perdure status``, by the files of the run."""
    document = from_files(run.store.root)
    rows = await attempts_of(None, document, is_local=False)
    return [row for row in rows if row["task"] == "trainer"]


async def require_ranks_like_their_trainer(
    fleet: RayFleet, run: Run, gpus: dict[str, tuple[str, ...]]
) -> None:
    """The trainer's second rank is a child that was started with the trainer's environment."""
    assert not gpus.get("producer")
    actor = (await statuses(fleet, run))["trainer"].pid
    ranks = [child.pid for child in psutil.Process(actor).children()]
    assert [variable(pid, "CUDA_VISIBLE_DEVICES") for pid in ranks] == [",".join(gpus["trainer"])]
    assert [variable(pid, "NCCL_CUMEM_ENABLE") for pid in ranks] == ["0"]


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


async def test_every_process_of_a_disaggregated_run_sees_its_own_gpus(fleet: RayFleet, make_run):
    run: Run = make_run(**sections("disaggregated", processes=2, engines=2))
    gpus = await bring_up(fleet, run)
    trainer, engines = gpus["trainer"], (gpus["engine-0"], gpus["engine-1"])
    assert len(trainer) == 2
    assert sorted(each for found in (trainer, *engines) for each in found) == list("0123")
    assert free_gpus() == 0
    await require_ranks_like_their_trainer(fleet, run, gpus)


async def test_colocated_processes_share_gpus_and_each_rank_counts_its_lives(
    fleet: RayFleet, make_run
):
    run: Run = make_run(**sections("colocated", processes=2, engines=2))
    run.store.write_json(layout.WORKFLOW_JSON, {"run_id": run.ref.run_id, "status": "training"})
    gpus = await bring_up(fleet, run)
    trainer = gpus["trainer"]
    assert len(trainer) == 2
    assert (gpus["engine-0"], gpus["engine-1"]) == (trainer[:1], trainer[1:])
    assert free_gpus() == 2
    await require_ranks_like_their_trainer(fleet, run, gpus)

    first = await ranks_of(run)
    assert [(row["rank"], row["state"], row["attempt"]) for row in first] == [
        (0, "running", 0),
        (1, "running", 0),
    ]
    assert {row["host"] for row in first} == {socket.gethostname()}
    assert [(row["last_failure"], row["reason"]) for row in first] == [(None, None)] * 2
    leader, rank = (psutil.Process(row["pid"]) for row in first)
    assert [child.pid for child in leader.children()] == [rank.pid]

    rank.kill()
    await asyncio.to_thread(psutil.wait_procs, [leader, rank], 15)
    how = "rank 1 of 2 of the trainer was ended by SIGKILL; its log is "
    dead = await ranks_of(run)
    assert [(row["rank"], row["state"], row["attempt"]) for row in dead] == [
        (0, "lost", 0),
        (1, "lost", 0),
    ]
    assert dead[0]["reason"].startswith(f"ended because {how}")
    assert dead[1]["reason"].startswith(how)

    run.claim()
    await bring_up(fleet, run)
    second = await ranks_of(run)
    assert [(row["rank"], row["state"], row["attempt"]) for row in second] == [
        (0, "running", 1),
        (1, "running", 1),
    ]
    assert [row["last_failure"] for row in second] == ["TrainerLost", "TrainerLost"]
    assert [row["reason"] for row in second] == [row["reason"] for row in dead]
    assert not {row["pid"] for row in second} & {row["pid"] for row in first}


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
