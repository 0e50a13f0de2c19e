"""What the scaling script judges, what it asks runs for, and the arguments that it refuses."""

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from activities.storage import layout
from activities.storage.store import Store
from configs.load import load_run

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
DEADLINE_S = 30.0
MACHINE = {"python": "3.12.3", "gpu": None, "load_average": [0.5, 0.25, 1.0]}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # they share modules
    return importlib.import_module(name)


def trainer_row(world: int, rate: float, gap: float) -> dict[str, Any]:
    own = {"world": world, "compiled": True, "tokens": 16384 * world, "tokens_per_s": rate}
    timed = {"seconds": 1.0, "mfu": 0.3, "peak_gib": 50.0, "norm_gap": 0.0, "loss_moved": 0.1}
    return {**own, **timed, "efficiency": rate / world / 100.0, "loss_gap": gap}


def publication_row(engines: int, seconds: float, *, confirmed: bool = True) -> dict[str, Any]:
    last = [{"engine": "engine-0", "version": 5, "digest": "ab" * 32}]
    kind = {"engines": engines, "trainers": 4, "transport": "nccl", "bytes": 10**9, "last": last}
    timed = {"seconds": seconds, "first_seconds": 2.0, "load_seconds": 0.5, "folder_seconds": 1.0}
    return {**kind, **timed, "bytes_per_s": 2e9, "confirmed": confirmed}


def results(**changed: Any) -> dict[str, dict[str, Any]]:
    """Of eight GPUs on which every goal holds."""
    engines = {"tensor_parallel": 1, "concurrency": 128}
    found: dict[str, Any] = {
        "trainer": [trainer_row(1, 100.0, 0.0), trainer_row(4, 352.0, 9e-4)],
        "engines": [
            {**engines, "engines": 1, "tokens_per_s": 10.0, "ratio": 1.0, "shares": [1.0]},
            {**engines, "engines": 4, "tokens_per_s": 37.0, "ratio": 0.925, "shares": [0.25] * 4},
            {**engines, "engines": 1, "tensor_parallel": 2, "tokens_per_s": 12.0, "ratio": 1.2,
             "shares": [1.0]},
        ],
        "publication": [publication_row(1, 1.0), publication_row(2, 1.1)],
        "kill": [
            {"killed": "engine 0", "updates_before": 34, "seconds_to_update": 1.5,
             "seconds_to_replacement": 50.0},
            {"killed": "trainer rank 3", "updates_before": 40, "seconds_to_update": 30.0,
             "seconds_to_replacement": None},
        ],
    }  # fmt: skip
    extra: dict[str, Any] = {
        "async": {"rows": [], "publication": [publication_row(4, 1.29)]},
        "kill": {
            "audit": {"missing": 0, "doubled": 0, "updates_redone": 3, "verdict": "accounted for"}
        },
    }
    whole = {part: {"rows": rows, "machine": MACHINE, "cpu": False} for part, rows in found.items()}
    for part, more in extra.items():
        whole[part] = {"rows": [], "machine": MACHINE, "cpu": False, **whole.get(part, {}), **more}
    for part, change in changed.items():
        if change is None:
            del whole[part]
        else:
            whole[part] = {**whole[part], **change}
    return whole


def verdicts(module: ModuleType, found: dict[str, dict[str, Any]]) -> list[bool | None]:
    return [goal.holds for goal in module.goals(found)]


def test_every_goal_holds_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("scaling_goals", monkeypatch)
    judged = list(module.goals(results()))
    assert [goal.holds for goal in judged] == [True] * 7
    assert [goal.value for goal in judged] == [
        "0.880 at 4", "9.0e-04", "0.925 with 4", "1.29 with 4", "the same", "1.5 s, 30.0 s", "0, 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "change", "place"),
    [
        ("trainer", {"rows": [trainer_row(1, 100, 0), trainer_row(4, 339, 0)]}, 0),
        ("trainer", {"rows": [trainer_row(1, 100, 0), trainer_row(4, 340, 1.1e-3)]}, 1),
        ("engines", {"rows": [{"engines": 4, "ratio": 0.899}]}, 2),
        ("async", {"publication": [publication_row(4, 1.31)]}, 3),
        ("publication", {"rows": [publication_row(1, 1.0, confirmed=False)]}, 4),
        ("kill", {"rows": [{"seconds_to_update": 1.0}]}, 5),
        ("kill", {"audit": {"missing": 1, "doubled": 0}}, 6),
        ("kill", {"audit": {"missing": 0, "doubled": 2}}, 6),
    ],
)
def test_what_misses_its_goal_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, part: str, change: dict[str, Any], place: int
) -> None:
    found = verdicts(load("scaling_goals", monkeypatch), results(**{part: change}))
    assert [index for index, holds in enumerate(found) if not holds] == [place]


@pytest.mark.parametrize(
    ("part", "places"),
    [("trainer", [0, 1]), ("engines", [2]), ("publication", [3]), ("async", [3]), ("kill", [5, 6])],
)
def test_a_part_that_left_nothing_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, part: str, places: list[int]
) -> None:
    found = verdicts(load("scaling_goals", monkeypatch), results(**{part: None}))
    assert [index for index, holds in enumerate(found) if holds is False] == places


def test_speed_is_not_judged_on_a_cpu_and_correctness_is(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [trainer_row(1, 100, 0), trainer_row(2, 30, 0)]
    cpu = results(trainer={"rows": slow, "cpu": True})
    found = verdicts(load("scaling_goals", monkeypatch), cpu)
    assert found == [None, True, None, None, True, True, True]


def test_one_engine_has_no_publication_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    two = results(publication=None, **{"async": {"publication": [publication_row(1, 1.0)]}})
    assert verdicts(load("scaling_goals", monkeypatch), two)[3] is None


def test_the_exit_code_is_the_verdict(tmp_path: Path) -> None:
    for part, result in results().items():
        (tmp_path / f"{part}.json").write_text(json.dumps(result))

    def judge() -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(BENCHMARKS / "scaling_goals.py"), str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)

    done = judge()
    assert done.returncode == 0, done.stderr
    assert "| 4 | yes | 65,536 | 1.000 | 352 | 0.300 | 0.880 |" in done.stdout
    assert "| audit after the kills: missing, doubled | 0, 0 | 0, 0 | yes |" in done.stdout
    (tmp_path / "kill.json").unlink()
    assert judge().returncode == 1


def test_trainers_run_beside_one_another_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("scaling_trainer", monkeypatch)
    assert list(module.waves([1, 2, 4], 8)) == [[1, 2, 4]]
    assert list(module.waves([1, 2, 4], 4)) == [[1, 2], [4]]
    assert list(module.waves([1, 2], 2)) == [[1], [2]]


def test_losses_are_compared_with_one_ranks_of_the_same_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = load("scaling_trainer", monkeypatch)
    one = {"world": 1, "tokens_per_s": 10.0, "losses": {"1": [9.0, 9.5], "2": [1.0, 2.0]}}
    one["norms"] = {"1": [1.0, 1.0], "2": [4.0, 5.0]}
    two = {"world": 2, "tokens_per_s": 18.0, "losses": {"2": [1.25, 1.75]}}
    two["norms"] = {"2": [4.0, 5.5]}
    lost = {"world": 4, "error": "rank 3 of 4 ended -9"}
    rows = module.compared([one, two, lost])
    assert (rows[0]["efficiency"], rows[0]["loss_gap"], rows[0]["loss_moved"]) == (1.0, 0.0, 0.5)
    assert rows[1]["efficiency"] == pytest.approx(0.9)
    assert (rows[1]["loss_gap"], rows[1]["loss_moved"]) == (0.25, 0.5)
    assert rows[1]["norm_gap"] == pytest.approx(0.1)
    assert rows[2] == lost


def test_tokens_of_an_engine_are_added_over_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "# HELP sglang:generation_tokens_total x\n"
        'sglang:generation_tokens_total{model_name="m",rank="0"} 120.0\n'
        'sglang:generation_tokens_total{model_name="m",rank="1"} 3.0\n'
        "sglang:generation_tokens_total_created 9\n"
    )
    assert load("scaling_engines", monkeypatch).counted(text) == 123.0


def published(version: int, seconds: float, digests: tuple[str, str]) -> dict[str, Any]:
    engines = [
        {"engine": f"engine-{rank}", "version": version, "digest": digest, "seconds": 0.1}
        for rank, digest in enumerate(digests)
    ]
    kind = {"buckets": 1, "transport": "nccl", "version": version, "digest": "a"}
    moved = {"num_bytes": 100, "load_seconds": seconds / 2, "folder_seconds": 1.0}
    return {**kind, **moved, "total_seconds": 1.0 + seconds, "engines": engines}


def test_a_publication_is_timed_to_where_engines_sample_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The two first ones, and one that found the version live, do not count."""
    module = load("scaling_records", monkeypatch)
    store = Store(tmp_path)
    rows = [published(v, s, ("a", "a")) for v, s in ((0, 9.0), (1, 8.0), (2, 2.0), (3, 4.0))]
    for row in [*rows, {**published(3, 0.1, ("a", "a")), "buckets": 0}]:
        store.append_jsonl(layout.PUBLICATION, row)
    row = module.publication_row(store, 4)
    assert (row["engines"], row["publications"], row["confirmed"]) == (2, 2, True)
    assert (row["seconds"], row["load_seconds"], row["first_seconds"]) == (3.0, 1.5, 9.0)
    assert row["bytes_per_s"] == pytest.approx((100 + 50) / 2)
    store.append_jsonl(layout.PUBLICATION, published(4, 2.0, ("a", "b")))
    assert not module.publication_row(store, 4)["confirmed"]


def test_gpus_idle_while_updates_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the end of the third publication, at 30 s, to that of the fifth, at 50 s."""
    module = load("scaling_records", monkeypatch)
    store = Store(tmp_path)
    for update in range(5):
        row = {"stage": "publication", "rollout_id": update, "started_unix": 10.0 * update + 9}
        store.append_jsonl(layout.DRIVER_TIMING, {**row, "seconds": 1.0, "passed": True})
    for time_unix, first, second in ((29.0, 0, 0), (31.0, 100, 50), (49.0, 60, None), (51.0, 0, 0)):
        shares = enumerate((first, second))
        devices = [{"index": index, "utilization.gpu": share} for index, share in shares]
        store.append_jsonl("gpus.jsonl", {"time_unix": time_unix, "devices": devices})
    store.append_jsonl("gpus.jsonl", {"time_unix": 40.0, "error": "the driver did not answer"})
    idle = module.gpu_idle(store, store, "gpus.jsonl")
    assert idle == pytest.approx({"0": 0.2, "1": 0.5})
    assert module.gpu_idle(store, store, "none.jsonl") is None


@pytest.mark.parametrize("cpu", [False, True])
def test_every_run_is_valid_and_has_the_same_collections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu: bool
) -> None:
    module = load("scaling_runs", monkeypatch)
    gpus = 2 if cpu else 8
    bench = module.Bench(Namespace(cpu=cpu, gpus=gpus, work=tmp_path, budget_s=60.0))
    specs = {}
    for kind, engines in (("publication-1", 1), ("async", bench.engines), ("colocated", gpus)):
        file = tmp_path / f"{kind}.json"
        file.write_text(json.dumps(bench.document(kind, engines, 12)))
        specs[kind] = load_run(str(file), ()).spec
    half = 2 if cpu else 4
    trainers = {kind: spec.trainer.num_processes for kind, spec in specs.items()}
    assert trainers == {"publication-1": half, "async": half, "colocated": gpus}
    assert {spec.samples_per_collection for spec in specs.values()} == {64 * half}
    assert {spec.steps_per_update for spec in specs.values()} == {1}
    assert [spec.fully_async for spec in specs.values()] == [True, True, False]
    wanted = ("disk", "disk", "disk") if cpu else ("nccl", "nccl", "ipc")
    assert tuple(spec.publication_transport for spec in specs.values()) == wanted
    assert len({spec.name for spec in specs.values()}) == 3


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "how many GPUs: 2, 4 or 8, not ''"),
        (("3",), "not '3'"),
        (("--cpu", "4"), "--cpu runs with two processes, not 4"),
        (("--cpu", "2", "nonsense"), "no part 'nonsense'"),
        (("2",), "2 GPUs are asked for, 0 are there"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    own = {"OUT": str(tmp_path / "out"), "PATH": f"{driver.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "scripts/gpu_scale.sh", *arguments],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert why in done.stderr
    assert not (tmp_path / "out").exists()
