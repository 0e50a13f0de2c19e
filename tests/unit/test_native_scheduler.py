"""Continuous batching: sharing, compaction, budgets, pauses; each response as if it were alone."""

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.errors import ConfigurationError
from workers.engines.native.core import Core
from workers.engines.native.model_shape import read_model_shape
from workers.engines.native.options import parse_options
from workers.engines.native.request import Event, Finished, Refused, Request, Sampling
from workers.engines.native.text import TextCodec
from workers.engines.native.weights import WeightStore

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def write_model(folder: Path, seed: int = 0, config: dict[str, object] = CONFIG) -> Path:
    """A random HF folder; the same seed gives the same weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    store = WeightStore(read_model_shape(folder), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(view.shape, generator=generator) * 0.2 + (view.ndim == 1)
        for name, view in store.named.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


class Bench:
    """A core with its events, driven by hand."""

    def __init__(self, folder: Path, *extra: str) -> None:
        told = ["--model-path", str(folder), "--dtype", "float32", "--context-length", "128"]
        self.events: dict[str, Event] = {}
        self.core = Core(
            parse_options([*told, *extra]),
            read_model_shape(folder),
            128,
            TextCodec(folder),
            lambda request, event: self.events.__setitem__(request.rid, event),
        )
        self.scheduler = self.core.scheduler

    def turns(self, count: int = 1000) -> None:
        with torch.inference_mode():
            for _ in range(count):
                if not self.scheduler.turn():
                    return

    def run(self, requests: Iterable[Request]) -> dict[str, Finished]:
        for request in requests:
            self.scheduler.add(request)
        self.turns()
        return {rid: self.finished(rid) for rid in self.events}

    def finished(self, rid: str) -> Finished:
        event = self.events[rid]
        assert isinstance(event, Finished)
        return event


def ask(rid: str, prompt: list[int], seed: int = 0, **told: object) -> Request:
    values = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_new_tokens": 12,
        "min_new_tokens": 0,
        "stop_token_ids": (2,),
        "stop_strings": (),
        "seed": seed,
    } | told
    sampling = Sampling(**values)  # type: ignore[arg-type]
    return Request(rid, prompt, sampling, None, False, False, time.monotonic())


def mixed_requests() -> list[Request]:
    """Three groups of four siblings and four loners, of all lengths."""
    groups = [
        ask(f"g{group}s{sibling}", [group + 5, 9, 8, 7 + group] * (group + 1), 10 * group + sibling)
        for group in range(3)
        for sibling in range(4)
    ]
    loners = [
        ask(f"l{n}", list(range(3, 4 + 9 * n)), n, max_new_tokens=3 + 5 * n) for n in range(4)
    ]
    return groups + loners


def test_group_prefix_sharing_equals_independent_requests(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    together = Bench(folder)
    requests = mixed_requests()
    answers = together.run(requests)
    # Three of each group of four, and the last loner: it begins with the whole of the one before.
    assert sum(request.cached_tokens > 0 for request in requests) == 10
    for request in mixed_requests():
        alone = Bench(folder).run([request])[request.rid]
        assert answers[request.rid].output_ids == alone.output_ids
        assert answers[request.rid].finish_reason == alone.finish_reason
        difference = torch.tensor(answers[request.rid].logprobs) - torch.tensor(alone.logprobs)
        assert difference.abs().max() < 1e-5


def test_late_siblings_share_a_running_request(tmp_path: Path) -> None:
    bench = Bench(write_model(tmp_path / "m"))
    prompt = [5, 6, 7, 8]
    bench.scheduler.add(ask("first", prompt, max_new_tokens=20, stop_token_ids=()))
    bench.turns(4)
    late = ask("late", prompt, seed=1)
    bench.scheduler.add(late)
    bench.turns()
    assert late.cached_tokens == 3
    alone = Bench(tmp_path / "m").run([ask("late", prompt, seed=1)])["late"]
    assert bench.finished("late").output_ids == alone.output_ids


def resubmitted() -> list[Request]:
    """Two groups of siblings that come back with tokens of their own, and one without any."""
    return [
        replace(
            ask(f"g{group}s{sibling}", [*range(20 + group, 60), *range(3, 3 + 2 * sibling)], 9),
            want_experts=True,
        )
        for group in range(2)
        for sibling in (3, 0, 1, 5)
    ]


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("arriving", [1, 3, 8])
def test_siblings_with_tokens_of_their_own_extend_a_common_prompt(
    config: dict[str, object], arriving: int, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", config=config)
    bench = Bench(folder, "--enable-return-routed-experts")
    requests = resubmitted()
    for start in range(0, len(requests), arriving):
        for request in requests[start : start + arriving]:
            bench.scheduler.add(request)
        bench.turns(1)
    bench.turns()
    # Of each group one computes its prompt; what the others have in common with it is 40 tokens or
    # 39, less the last one of the shortest context.
    assert [request.cached_tokens >= 38 for request in requests].count(True) == 6
    for request in resubmitted():
        alone = Bench(folder, "--enable-return-routed-experts").run([request])[request.rid]
        answer = bench.finished(request.rid)
        assert answer.output_ids == alone.output_ids
        assert answer.experts == alone.experts
        difference = torch.tensor(answer.logprobs) - torch.tensor(alone.logprobs)
        assert difference.abs().max() < 1e-5


def test_new_weights_are_never_mixed_into_an_old_prefix(tmp_path: Path) -> None:
    bench = Bench(write_model(tmp_path / "m"))
    prompt = list(range(20, 60))
    bench.scheduler.add(ask("old", prompt, max_new_tokens=60, stop_token_ids=()))
    bench.turns(2)
    bench.scheduler.weights_changed("v1")
    late = ask("late", [*prompt, 5, 6])
    bench.scheduler.add(late)
    bench.turns()
    assert late.cached_tokens == 0


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "moe"])
def test_deterministic_mode_is_bit_equal_whoever_the_neighbors_are(
    config: dict[str, object], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", config=config)
    options = ("--deterministic", "--max-running-requests", "16")
    answers = Bench(folder, *options).run(mixed_requests())
    for request in mixed_requests()[::3]:
        alone = Bench(folder, *options).run([request])[request.rid]
        assert answers[request.rid].output_ids == alone.output_ids
        assert answers[request.rid].logprobs == alone.logprobs


def test_more_requests_than_slots_and_budget_all_finish(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    wide = Bench(folder).run(mixed_requests())
    narrow = Bench(folder, "--max-running-requests", "3").run(mixed_requests())
    assert {rid: answer.output_ids for rid, answer in narrow.items()} == {
        rid: answer.output_ids for rid, answer in wide.items()
    }


def test_cache_never_exceeds_its_budget(tmp_path: Path) -> None:
    bench = Bench(write_model(tmp_path / "m"))
    cache = bench.scheduler.cache
    cache.max_tokens = 150
    for request in mixed_requests():
        bench.scheduler.add(request)
    with torch.inference_mode():
        while bench.scheduler.turn():
            assert cache.slots * cache.capacity <= 150
    assert len(bench.events) == len(mixed_requests())


def test_a_context_beyond_the_budget_is_refused_at_start(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", config=CONFIG | {"num_key_value_heads": 4})
    with pytest.raises(ConfigurationError, match="--kv-budget-mib 1 holds 1024 tokens"):
        Bench(folder, "--kv-budget-mib", "1", "--deterministic")


def test_stop_tokens_lengths_and_minimum(tmp_path: Path) -> None:
    bench = Bench(write_model(tmp_path / "m"))
    every = tuple(range(320))
    answers = bench.run(
        [
            ask("stop", [5, 6], stop_token_ids=every),
            ask("length", [5, 6], max_new_tokens=1, stop_token_ids=every),
            ask("ignore", [5, 6], stop_token_ids=()),
            ask("least", [5, 6], stop_token_ids=every[:200], min_new_tokens=5, max_new_tokens=99),
        ]
    )
    assert len(answers["stop"].output_ids) == 1
    assert answers["stop"].finish_reason == {
        "type": "stop",
        "matched": answers["stop"].output_ids[0],
    }
    assert answers["length"].finish_reason == {"type": "length", "length": 1}
    assert len(answers["ignore"].output_ids) == 12
    assert len(answers["least"].output_ids) > 5
    assert all(token >= 200 for token in answers["least"].output_ids[:5])


def test_retraction_keeps_tokens_and_continues_under_new_weights(tmp_path: Path) -> None:
    old, new = write_model(tmp_path / "old"), write_model(tmp_path / "new", seed=1)
    bench = Bench(old)
    request = ask("r", [5, 6, 7], stop_token_ids=(), max_new_tokens=10, temperature=0.0)
    bench.scheduler.add(request)
    bench.turns(4)
    bench.core.pause("retract")
    assert not bench.core.update(new, "v1", flush_cache=True).success
    result = bench.core.update(new, "v1", flush_cache=False)
    assert (result.success, result.num_paused) == (True, 1)
    bench.core.resume()
    bench.turns()
    answer = bench.finished("r")
    head = Bench(old).run([ask("h", [5, 6, 7], max_new_tokens=4, temperature=0.0)])["h"]
    assert answer.output_ids[:4] == head.output_ids
    context = [5, 6, 7, *head.output_ids]
    tail = Bench(new).run(
        [ask("t", context, max_new_tokens=6, temperature=0.0, stop_token_ids=())]
    )["t"]
    assert answer.output_ids[4:] == tail.output_ids
    assert request.num_retractions == 1
    assert answer.weight_version == "v1"


def test_retraction_without_an_update_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(write_model(tmp_path / "m"))
    for request in mixed_requests():
        bench.scheduler.add(request)
    for _ in range(3):
        bench.turns(2)
        bench.core.pause("retract")
        bench.core.resume()
    bench.turns()
    expected = Bench(tmp_path / "m").run(mixed_requests())
    got = {rid: bench.finished(rid).output_ids for rid in bench.events}
    assert got == {rid: answer.output_ids for rid, answer in expected.items()}


def test_abort_keeps_the_tokens_of_running_requests_only(tmp_path: Path) -> None:
    bench = Bench(write_model(tmp_path / "m"), "--max-running-requests", "1")
    for rid in ("ab", "abc", "x"):
        bench.scheduler.add(ask(rid, [5, 6, 7], stop_token_ids=(), max_new_tokens=50))
    bench.turns(3)
    bench.core.abort("ab")
    assert len(bench.finished("ab").output_ids) == 3
    assert bench.finished("ab").finish_reason["message"] == "Aborted"
    assert bench.finished("abc").output_ids == []
    assert bench.finished("abc").finish_reason["message"] == "Abort in waiting queue"
    assert not bench.finished("abc").was_admitted
    assert "x" not in bench.events


def test_queue_limit_and_time_outs(tmp_path: Path) -> None:
    limits = ("--max-running-requests", "1", "--max-queued-requests", "1")
    bench = Bench(write_model(tmp_path / "m"), *limits, "--req-waiting-timeout", "0.01")
    for rid in ("runs", "waits", "refused"):
        bench.scheduler.add(ask(rid, [5, 6, 7], stop_token_ids=(), max_new_tokens=100))
    assert bench.events["refused"] == Refused(503, "The request queue is full.")
    bench.scheduler.waiting[1].arrived -= 1
    bench.turns(2)
    assert bench.events["waits"] == Refused(503, "Request waiting timeout reached.")
    assert "runs" not in bench.events


def test_running_time_out_frees_the_slot(tmp_path: Path) -> None:
    bench = Bench(write_model(tmp_path / "m"), "--req-running-timeout", "60")
    for rid in ("slow", "next"):
        bench.scheduler.add(ask(rid, [5, 6, 7], stop_token_ids=(), max_new_tokens=20))
    bench.turns(2)
    bench.scheduler.running[0].started -= 61
    bench.turns()
    assert bench.events["slow"] == Refused(503, "Request running timeout reached.")
    assert len(bench.finished("next").output_ids) == 20


def test_a_half_copied_update_is_no_known_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(write_model(tmp_path / "m"))

    def fail(_: Path) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(bench.core.weights, "load", fail)
    result = bench.core.update(tmp_path / "m", "v1", flush_cache=True)
    assert not result.success
    assert "partially updated" in result.message
    assert bench.scheduler.weight_version == "unknown"


def test_update_refuses_other_shapes_and_keeps_the_old_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    bench = Bench(folder)
    before = bench.core.checksums()
    other = write_model(tmp_path / "wide", config=CONFIG | {"hidden_size": 64})
    lacking = write_model(tmp_path / "lacking")
    save_file({"model.norm.weight": torch.ones(48)}, lacking / "model.safetensors")
    torn = write_model(tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    for bad in (other, lacking, torn, tmp_path / "nowhere"):
        result = bench.core.update(bad, "v9", flush_cache=True)
        assert not result.success
        assert str(bad) in result.message
    assert bench.core.checksums() == before
    assert bench.scheduler.weight_version == "default"


@pytest.mark.parametrize(
    "broken",
    [{"hidden_size": "wide"}, {"max_position_embeddings": None}, {"rope_scaling": "linear"}],
)
def test_update_from_a_folder_with_a_broken_config_is_refused(
    tmp_path: Path, broken: dict[str, object]
) -> None:
    bench = Bench(write_model(tmp_path / "m"))
    bad = write_model(tmp_path / "bad")
    (bad / "config.json").write_text(json.dumps(CONFIG | broken))
    result = bench.core.update(bad, "v9", flush_cache=True)
    assert not result.success
    assert str(bad / "config.json") in result.message
    assert bench.scheduler.weight_version == "default"
