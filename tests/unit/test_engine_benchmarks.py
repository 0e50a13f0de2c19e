"""What the benchmarks of a live engine make of their measurements."""

import importlib.util
import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from activities.storage import layout
from activities.storage.store import Store
from configs.load import load_run

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = ("engine_throughput", "logprob_agreement", "refresh_recipes")


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # they share a module
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def told(folder: Path, **more: Any) -> Namespace:
    """Options as the command line gives them."""
    settled = {"model": "tiny", "device": "cpu", "dtype": "float32", "threads": 1, "sglang": []}
    lengths = {"prompt_tokens": 16, "new_tokens": 8, "siblings": 4}
    return Namespace(**{**settled, "work": folder, **lengths, **more})


def test_the_first_wave_of_a_client_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once: answers at 1 and 2 s, then four more by 10 s of 5 tokens each: 20 in 8 s."""
    module = load("client_process", monkeypatch)
    ends = [10.0, 1.0, 2.0, 4.0, 6.0, 8.0]
    answers = [{"begin": 0.0, "end": end, "tokens": 5} for end in ends]
    row = module.steady(answers, 2, cpu_seconds=3.0)
    assert row["tokens_per_s"] == pytest.approx(20 / 8)
    assert row["cpu_seconds"] == pytest.approx(2.0)
    assert row["cpu_us_per_token"] == pytest.approx(2e6 / 20)


def test_both_sides_are_asked_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight at once in groups of four and two waves that count: six groups, siblings adjacent."""
    module = load("engine_throughput", monkeypatch)
    load_ = module.make_load(told(tmp_path, waves=2), 8, vocab_size=50)
    requests = load_.requests()
    assert [each["ids"] for each in requests[::4]] == load_.prompts[:6]
    assert all(requests[n] == requests[n - n % 4] for n in range(24))
    assert len(requests) == 24
    spec = module.spec_for(told(tmp_path), 8, tmp_path, load_.groups)
    assert (spec.samples_per_collection, spec.inference.server_concurrency) == (8, 8)
    assert spec.fully_async


def test_sglangs_client_is_run_on_the_given_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in of its module: what it is told, and what is kept of its answers."""
    module = load("sglang_client", monkeypatch)
    seen: dict[str, Any] = {}

    def cli_main() -> None:
        seen["argv"] = sys.argv
        seen["rows"] = serving.get_dataset(None, None, None)
        answer = SimpleNamespace(success=True, start_time=2.0, latency=0.5, output_len=7)
        seen["kept"] = serving.calculate_metrics(outputs=[answer])

    serving = SimpleNamespace(
        cli_main=cli_main, get_dataset=None, calculate_metrics=lambda **told: "its own figures"
    )
    datasets = SimpleNamespace(DatasetRow=lambda **fields: fields)
    packages = {"sglang": SimpleNamespace(), "sglang.benchmark": SimpleNamespace(serving=serving)}
    for name, found in {**packages, "sglang.benchmark.datasets": datasets}.items():
        monkeypatch.setitem(sys.modules, name, found)
    monkeypatch.setattr(sys, "argv", sys.argv)
    requests, times = tmp_path / "requests.json", tmp_path / "times.json"
    requests.write_text(json.dumps([{"ids": [5, 6, 7], "new": 9}]))
    module.Client().run(requests, times, ["--backend", "sglang"])
    assert seen["argv"][1:] == ["--backend", "sglang"]
    assert seen["rows"] == [{"prompt": [5, 6, 7], "prompt_len": 3, "output_len": 9}]
    assert seen["kept"] == "its own figures"
    written = json.loads(times.read_text())
    assert written["answers"] == [{"begin": 2.0, "end": 2.5, "tokens": 7}]
    assert 0 <= written["cpu_seconds"] < 10


def test_a_failed_request_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("sglang_client", monkeypatch)
    with pytest.raises(SystemExit, match="1 requests failed, the first one with: too long"):
        module.spans([SimpleNamespace(success=False, error="too long")])


def test_computed_prompt_tokens_are_read_from_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as SGLang 0.5.17 serves them; cached and decoded tokens are other series."""
    module = load("live_engine", monkeypatch)
    text = """# HELP sglang:realtime_tokens_total Total number of tokens processed in realtime.
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_compute",tp_rank="0"} 1224.0
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_cache",tp_rank="0"} 77.0
sglang:realtime_tokens_total{engine_type="unified",mode="decode",tp_rank="0"} 9000.0
"""
    assert module.prefill_count(text) == 1224
    assert module.prefill_count("") == 0


def test_gaps_of_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences 0.1, -0.3 and 0 by hand."""
    module = load("logprob_agreement", monkeypatch)
    row = module.gap([[-1.0, -2.3], [-0.5]], [[-1.1, -2.0], [-0.5]])
    assert row["tokens"] == 3
    assert row["mean_abs"] == pytest.approx(0.4 / 3)
    assert row["max_abs"] == pytest.approx(0.3)
    assert row["p99_abs"] == pytest.approx(0.3)
    assert row["mean"] == pytest.approx(-0.2 / 3)
    assert row["equal"] == 1
    k3 = (math.exp(0.1) - 1.1 + math.exp(-0.3) - 0.7) / 3
    assert row["k3"] == pytest.approx(k3)


def test_what_a_publication_adds_to_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("refresh_recipes", monkeypatch)
    quiet = [{"seconds": s, "prefilled": 100} for s in (4.0, 5.0, 9.0)]
    stages = {"pause": 1.0, "update": 0.5, "continue": 0.1, "resent": 8}
    disturbed = [{"seconds": s, "prefilled": 900, **stages} for s in (7.0, 6.5, 20.0)]
    row = module.summary(quiet, disturbed)
    assert row["seconds_lost"] == pytest.approx(2.0)
    assert row["other_seconds"] == pytest.approx(0.4)
    assert (row["prefilled_again"], row["resent"]) == (800, 8)


@pytest.mark.parametrize("recipe", ["resubmit", "retract"])
def test_the_recipes_differ_in_the_prefix_cache(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("refresh_recipes", monkeypatch)
    spec = module.spec_for(told(tmp_path, live=8), recipe)
    assert spec.inference.sglang.get("disable_radix_cache", False) == (recipe == "retract")


def test_updates_beside_trl_are_read_from_the_artifacts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates of 4 + 5 + 1 s, each stage 0.1 s after the last one; the first has no begin."""
    module = load("trl_comparison", monkeypatch)
    store, clock = Store(tmp_path), 100.0
    for update in range(3):
        for stage, seconds in (("generation_wait", 4.0), ("training", 5.0), ("publication", 1.0)):
            row = {"stage": stage, "rollout_id": update, "started_unix": clock, "seconds": seconds}
            store.append_jsonl(layout.DRIVER_TIMING, {**row, "passed": True})
            clock += seconds + 0.1
        store.append_jsonl(layout.METRICS, {"update": update, "rollout/reward": 0.1 * update})
    updates = module.perdure_updates(store)
    assert [row["reward"] for row in updates] == pytest.approx([0.1, 0.2])
    found = module.summary(updates)
    assert found["seconds"] == pytest.approx(10.3)
    assert (found["train_seconds"], found["other_seconds"]) == pytest.approx((5.0, 0.3))
    assert found["last_reward"] == pytest.approx(0.15)


@pytest.fixture
def trl_side(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script without TRL and its data sets, which are not installed here."""
    trl = SimpleNamespace(GRPOConfig=dict, GRPOTrainer=None)
    for name, found in {"trl": trl, "datasets": SimpleNamespace(Dataset=None)}.items():
        monkeypatch.setitem(sys.modules, name, found)
    return load("trl_grpo", monkeypatch)


@pytest.mark.parametrize(("micro", "accumulated", "generations"), [(0, 1, 2), (32, 4, 8)])
def test_trl_takes_the_same_optimizer_steps(
    micro: int, accumulated: int, generations: int, tmp_path: Path, trl_side: ModuleType
) -> None:
    """The recipe has 32 x 8 samples an update, 128 an optimizer step, 100 updates."""
    spec = load_run(BENCHMARKS.parent / "configs" / "recipes" / "tiny.toml").spec
    options = Namespace(micro_batch=micro, generation="continuous", out=tmp_path / "trl.json")
    found = trl_side.settings(spec, options)
    assert found["per_device_train_batch_size"] == (micro or 128)
    assert found["gradient_accumulation_steps"] == accumulated
    assert found["steps_per_generation"] == generations
    assert (found["max_steps"], found["num_generations"]) == (200, 8)
    assert (found["loss_type"], found["scale_rewards"]) == ("dapo", "none")
    assert found["use_transformers_continuous_batching"]


def test_updates_of_trl_last_from_end_to_end(trl_side: ModuleType) -> None:
    """Two optimizer steps an update; the first begins at 10 s."""
    measured = trl_side.Measured(steps_per_update=2, begun=10.0, ends=[12.0, 13.0, 17.0, 19.0])
    measured.sampling, measured.scoring = [1.0, 2.0], [0.1, 0.2]
    measured.rewards, measured.tokens = [0.25, 0.5], [64, 32]
    rows = measured.updates()
    assert [row["seconds"] for row in rows] == [3.0, 6.0]
    assert [row["rollout_seconds"] for row in rows] == [1.0, 2.0]
    assert [row["reward"] for row in rows] == [0.25, 0.5]


@pytest.mark.parametrize("recipe", ["tiny", "quickstart", "gpu-smollm2-gym"])
def test_recipes_beside_trl_are_valid(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("trl_comparison", monkeypatch)
    options = Namespace(set=["optimizer.weight_decay=0.1"], work=tmp_path, updates=7)
    path = BENCHMARKS.parent / "configs" / "recipes" / f"{recipe}.toml"
    spec = load_run(path, module.overrides_of(options)).spec
    assert spec.training.num_rollouts == 7
    assert spec.evaluation.interval is not None
    assert spec.evaluation.interval > 7


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_run_files_are_valid_on_both_devices(
    script: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(script, monkeypatch)
    options = told(tmp_path, device=device, live=8, prompts=8, engine="sglang")
    options.sglang = ["mem_fraction_static=0.3"] if device == "cuda" else []
    argument: dict[str, tuple[Any, ...]] = {
        "engine_throughput": (8, tmp_path),
        "logprob_agreement": ("deterministic" if device == "cuda" else "plain", "bfloat16"),
        "refresh_recipes": ("resubmit",),
    }
    spec = module.spec_for(options, *argument[script])
    assert spec.placement.mode == ("disaggregated" if device == "cuda" else "cpu")
    assert spec.inference.engine == "sglang"
    if device == "cuda":
        assert spec.inference.sglang["mem_fraction_static"] == 0.3
