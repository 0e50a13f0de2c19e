"""``/generate``: what every engine answers to a well-formed request."""

import base64
import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.support.engine_model import PROMPT
from tests.support.served_engine import ServedEngine

META = {
    *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions"),
    *("completion_tokens", "cached_tokens", "cached_tokens_details", "e2e_latency"),
}
LOGPROB_META = META | {
    "input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length",
}  # fmt: skip
LAYERS, TOP_K = 2, 2


async def test_an_answer_names_ids_tokens_and_log_probs(any_engine: ServedEngine) -> None:
    plain = await any_engine.generate()
    assert list(plain) == ["text", "output_ids", "meta_info"]
    assert set(plain["meta_info"]) >= META
    assert "output_token_logprobs" not in plain["meta_info"]
    scored = await any_engine.generate(return_logprob=True, rid="my-rid-1")
    meta = scored["meta_info"]
    assert set(meta) >= LOGPROB_META
    assert meta["id"] == "my-rid-1"
    assert meta["weight_version"] == "default"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (12, 4)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == scored["output_ids"]
    assert all(entry[0] < 0 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs_length"] == 4
    assert scored["output_ids"] == plain["output_ids"]


async def test_no_new_tokens_scores_the_prompt(any_engine: ServedEngine) -> None:
    told = {"max_new_tokens": 0, "return_logprob": True, "logprob_start_len": 0}
    scored = await any_engine.generate(**told)
    assert scored["output_ids"] == []
    prompt = scored["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in prompt] == PROMPT
    assert prompt[0][0] is None
    assert all(entry[0] < 0 for entry in prompt[1:])
    # Prompt log-probs are of temperature 1, whatever was asked.
    cold = await any_engine.generate(**told, sampling_params={"temperature": 0.5})
    told_twice = [
        [entry[0] for entry in body["meta_info"]["input_token_logprobs"][1:]]
        for body in (scored, cold)
    ]
    np.testing.assert_allclose(*told_twice, atol=any_engine.tolerance, rtol=0)


async def test_output_log_probs_are_those_of_scoring_the_same_tokens(
    any_engine: ServedEngine,
) -> None:
    sampled = await any_engine.generate(
        max_new_tokens=20, return_logprob=True, sampling_params={"temperature": 1}
    )
    whole = [*PROMPT, *sampled["output_ids"]]
    scored = await any_engine.generate(
        input_ids=whole, max_new_tokens=0, return_logprob=True, logprob_start_len=0
    )
    told = [entry[0] for entry in sampled["meta_info"]["output_token_logprobs"]]
    again = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"][len(PROMPT) :]]
    np.testing.assert_allclose(told, again, atol=any_engine.tolerance, rtol=0)


async def test_a_temperature_divides_the_logits_before_top_p_and_top_k(
    any_engine: ServedEngine,
) -> None:
    """At temperature t the log-prob is log softmax(logits / t), over the whole vocabulary."""
    sampled = await any_engine.generate(
        max_new_tokens=1,
        return_logprob=True,
        sampling_params={"temperature": 0.5, "top_p": 0.9, "top_k": 3},
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        any_engine.folders[0], dtype=torch.float32
    )
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1].double()
    ((logprob, token, _),) = sampled["meta_info"]["output_token_logprobs"]
    expected = float(torch.log_softmax(logits / 0.5, -1)[token])
    assert logprob == pytest.approx(expected, abs=any_engine.tolerance)
    assert token in logits.topk(3).indices.tolist()


async def test_siblings_and_batches_answer_lists(any_engine: ServedEngine) -> None:
    siblings = await any_engine.generate(rid="r" * 32, sampling_params={"n": 3, "temperature": 1})
    assert isinstance(siblings, list)
    assert len({sample["meta_info"]["id"] for sample in siblings}) == 3
    batch = await any_engine.generate(input_ids=[PROMPT, PROMPT[:5]], rid="batch")
    assert [sample["meta_info"]["prompt_tokens"] for sample in batch] == [12, 5]
    assert [sample["meta_info"]["id"] for sample in batch] == ["batch_0", "batch_1"]


async def test_routed_experts_have_one_row_a_fed_token(any_engine: ServedEngine) -> None:
    whole = await any_engine.generate(max_new_tokens=3, return_routed_experts=True)
    data = base64.b64decode(whole["meta_info"]["routed_experts"])
    experts = np.frombuffer(data, np.int32).reshape(12 + 3 - 1, LAYERS, TOP_K)
    assert experts.min() >= 0
    assert experts.max() < any_engine.config["num_experts"]
    assert (experts[..., 0] != experts[..., 1]).all()
    cut = await any_engine.generate(
        max_new_tokens=3, return_routed_experts=True, routed_experts_start_len=12
    )
    tail = np.frombuffer(base64.b64decode(cut["meta_info"]["routed_experts"]), np.int32)
    np.testing.assert_array_equal(tail, experts[12:].ravel())
    assert "routed_experts" not in (await any_engine.generate())["meta_info"]


async def test_stop_tokens_and_strings(any_engine: ServedEngine) -> None:
    free = await any_engine.generate(max_new_tokens=30)
    ids = free["output_ids"]
    assert len(ids) == 30
    stop_id = ids[9]
    told = {"ignore_eos": False, "stop_token_ids": [stop_id, 100_000]}
    stopped = await any_engine.generate(max_new_tokens=30, sampling_params=told)
    length = ids.index(stop_id) + 1
    assert stopped["output_ids"] == ids[:length]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    tokenizer = Tokenizer.from_file(str(any_engine.folders[0] / "tokenizer.json"))
    assert free["text"] == tokenizer.decode(ids)
    assert stopped["text"] == tokenizer.decode(ids[: length - 1])
    string = next(
        text for text in (tokenizer.decode([token]) for token in ids[3:]) if text.isascii() and text
    )
    cut = await any_engine.generate(max_new_tokens=30, sampling_params={"stop": [string]})
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": string}
    assert cut["text"] == free["text"][: free["text"].index(string)]
    assert ids[: len(cut["output_ids"])] == cut["output_ids"]
    # With ignore_eos no stop token is looked at, also not one that was asked for.
    deaf = await any_engine.generate(
        max_new_tokens=30, sampling_params={"stop_token_ids": [ids[9]]}
    )
    assert deaf["output_ids"] == ids


async def test_the_models_own_end_token_stops(any_engine: ServedEngine) -> None:
    """Token 2 is the configuration's; it belongs to the tokens and not to the text."""
    sampled = [
        await any_engine.generate(
            max_new_tokens=1500, sampling_params={"ignore_eos": False, "temperature": 1}
        )
        for _ in range(4)
    ]
    ended = [body for body in sampled if body["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    for body in ended:
        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        assert body["output_ids"].index(2) == len(body["output_ids"]) - 1
        assert "</s>" not in body["text"]


async def test_a_stream_is_cumulative_and_equals_the_answer(any_engine: ServedEngine) -> None:
    whole = await any_engine.generate(max_new_tokens=6, return_logprob=True)
    call = any_engine.body(6, return_logprob=True, stream=True)
    async with any_engine.http.stream("POST", "/generate", json=call) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    chunks = [line.removeprefix("data: ") for line in lines]
    assert chunks[-1] == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks[:-1]]
    lengths = [len(chunk["output_ids"]) for chunk in parsed]
    assert lengths == sorted(lengths)
    assert all(
        chunk["output_ids"] == whole["output_ids"][: len(chunk["output_ids"])] for chunk in parsed
    )
    assert [c["meta_info"]["finish_reason"] for c in parsed[:-1]] == [None] * (len(parsed) - 1)
    assert parsed[-1]["output_ids"] == whole["output_ids"]
    assert parsed[-1]["text"] == whole["text"]
    assert parsed[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
