"""The reference loop computes what it says, and the comparison reads a run's artifacts right."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from activities.storage import layout
from activities.storage.store import Store

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EOS, PAD = 1, 0


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load("reference_loop")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).float().eval()


@pytest.fixture
def prompts(reference: ModuleType) -> Any:
    ids = torch.tensor([[PAD, PAD, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    return reference.Prompts(ids, mask, ["3", "4"])


def unpadded_logprobs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """The plain forward of one sequence: what packing and caching must agree with."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    scores = F.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return scores.gather(-1, torch.tensor(response)[:, None])[:, 0]


def test_sampled_and_packed_logprobs_equal_the_plain_forward(
    reference: ModuleType, model: Any, prompts: Any
) -> None:
    torch.manual_seed(1)
    responses = reference.sample(model, prompts, 3, 6, 1.0, EOS)
    with torch.no_grad():
        packed = reference.packed_logprobs(model, prompts, responses.tokens, 3, 1.0)
    for index in range(6):
        row, keep = index // 3, responses.mask[index]
        prompt = prompts.ids[row][prompts.mask[row].bool()].tolist()
        expected = unpadded_logprobs(model, prompt, responses.tokens[index][keep].tolist())
        torch.testing.assert_close(responses.logprobs[index][keep], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(packed[index][keep], expected, atol=1e-5, rtol=0)


def test_a_response_is_masked_behind_its_stop_token(
    reference: ModuleType, model: Any, prompts: Any
) -> None:
    torch.manual_seed(2)
    responses = reference.sample(model, prompts, 64, 8, 1.0, EOS)
    stopped = (responses.tokens == EOS) & responses.mask
    assert stopped.any()
    assert (stopped.sum(1) <= 1).all()
    for tokens, mask in zip(responses.tokens.tolist(), responses.mask.tolist(), strict=True):
        end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        assert mask == [True] * end + [False] * (len(tokens) - end)


@pytest.mark.parametrize(
    ("text", "label", "score"),
    [("3 * 4 = 12", "12", 1.0), ("12 or 13", "12", 0.0), ("1,200", "1200", 1.0), ("", "0", 0.0)],
)
def test_the_last_number_counts(reference: ModuleType, text: str, label: str, score: float) -> None:
    assert reference.last_number_scores([text], [label]).tolist() == [score]


def test_costs_of_an_update_are_read_from_the_artifacts(tmp_path: Path) -> None:
    """Three updates of 4 + 5 + 1 s, each stage 0.1 s after the last; one checkpoint aside."""
    store, clock = Store(tmp_path), 100.0

    def stage(name: str, update: int | None, seconds: float) -> None:
        nonlocal clock
        row = {"stage": name, "rollout_id": update, "started_unix": clock, "seconds": seconds}
        store.append_jsonl(layout.DRIVER_TIMING, {**row, "passed": True})
        clock += seconds + 0.1

    stage("placement", None, 50.0)
    stage("evaluation", None, 3.0)
    for update in range(3):
        stage("generation_wait", update, 4.0)
        stage("training", update, 5.0)
        stage("publication", update, 1.0)
        store.append_jsonl(layout.METRICS, {"rollout/seconds": 3.9})
        store.append_jsonl(layout.METRICS, {"train/step_seconds": 4.8})
        if update == 1:
            stage("checkpoint", update, 7.0)
    store.append_jsonl(layout.METRICS, {"eval/step": 3, "eval/x": 0.5, "eval/x-truncated_ratio": 1})
    measured = load("quickstart_vs_loop").read_run(store)
    # nine stages and the checkpoint leave nine gaps of 0.1 s: (30 + 0.9) / 3
    assert measured["seconds_per_update"] == pytest.approx(10.3)
    assert measured["control_plane_share"] == pytest.approx((10.3 - 3.9 - 4.8 - 1.0) / 10.3)
    assert measured["evaluations"] == [(3, 0.5)]
