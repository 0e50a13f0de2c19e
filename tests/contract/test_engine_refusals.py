"""What every engine refuses, with which status and in which of the three shapes of a body."""

import json
from typing import Any

import pytest

from tests.support.engine_model import PROMPT
from tests.support.served_engine import ServedEngine

LONG = "The input (9000 tokens) is longer than the model's context length (4096 tokens)."
TOTAL = (
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You"
    " requested a total of 4190 tokens: 100 tokens from the input messages and 4090 tokens for the"
    " completion. Please reduce the number of tokens in the input messages or the completion to"
    " fit within the limit."
)
SHAPE_A: dict[str, tuple[dict[str, Any], str]] = {
    "too long input": ({"input_ids": [5] * 9000}, LONG),
    "input + max_new over context": (
        {"input_ids": [5] * 100, "sampling_params": {"max_new_tokens": 4090}},
        TOTAL,
    ),
    "empty": ({"input_ids": []}, "input_ids cannot be empty."),
    "no input": ({}, "Either text, input_ids or input_embeds should be provided."),
    "temperature": (
        {"input_ids": PROMPT, "sampling_params": {"temperature": -1}},
        "temperature must be a non-negative finite number, got -1.",
    ),
    "top_p": (
        {"input_ids": PROMPT, "sampling_params": {"top_p": 2.5}},
        "top_p must be in (0, 1], got 2.5.",
    ),
    "top_k": (
        {"input_ids": PROMPT, "sampling_params": {"top_k": 0}},
        "top_k must be -1 (disable) or at least 1, got 0.",
    ),
    "min_p": (
        {"input_ids": PROMPT, "sampling_params": {"min_p": 2.5}},
        "min_p must be in [0, 1], got 2.5.",
    ),
    "max_new_tokens": (
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}},
        "max_new_tokens must be at least 0, got -1.",
    ),
    "min over max": (
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 5}},
        "min_new_tokens must be in [0, max_new_tokens(2)], got 5.",
    ),
    "logprob_start_len": (
        {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 500},
        "req.logprob_start_len=500 is higher than the number of input tokens"
        " len(req.origin_input_ids)=12. Please use a smaller logprob_start_len.",
    ),
}


@pytest.mark.parametrize("name", SHAPE_A)
async def test_refusals_of_shape_a(any_engine: ServedEngine, name: str) -> None:
    told, message = SHAPE_A[name]
    answer = await any_engine.http.post("/generate", json=told)
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": message}})


SHAPE_B = {
    "strings for ids": ("/generate", '{"input_ids": ["a"]}'),
    "sampling_params no object": ("/generate", '{"input_ids": [5], "sampling_params": "x"}'),
    "not JSON": ("/generate", "{bad"),
    "no body to generate": ("/generate", ""),
    "pause in an unknown mode": ("/pause_generation", '{"mode": "zzz"}'),
    "no body to pause": ("/pause_generation", ""),
    "no body to continue": ("/continue_generation", ""),
    "no body to abort": ("/abort_request", ""),
    "update without a folder": ("/update_weights_from_disk", "{}"),
    "version that is a number": ("/update_weight_version", '{"new_version": 7}'),
    "time-out that is no number": ("/flush_cache?timeout=x", ""),
}


@pytest.mark.parametrize("name", SHAPE_B)
async def test_refusals_of_shape_b(any_engine: ServedEngine, name: str) -> None:
    path, content = SHAPE_B[name]
    headers = {"content-type": "application/json"}
    answer = await any_engine.http.post(path, content=content, headers=headers)
    told = answer.json()
    assert answer.status_code == 400, answer.text
    assert list(told) == ["object", "message", "type", "param", "code"]
    assert (told["object"], told["type"], told["param"], told["code"]) == (
        "error", "Bad Request", None, 400,
    )  # fmt: skip
    assert (await any_engine.generate())["meta_info"]["weight_version"] == "default"


async def test_an_unknown_sampling_key_is_an_internal_error(any_engine: ServedEngine) -> None:
    """SGLang also closes the connection, which a pool notices at its next use only."""
    headers = {"connection": "close"}
    body = any_engine.body(sampling_params={"heat": 1})
    unknown = await any_engine.http.post("/generate", json=body, headers=headers)
    assert (unknown.status_code, unknown.text) == (500, "Internal Server Error")


async def test_unknown_fields_paths_and_methods(any_engine: ServedEngine) -> None:
    ignored = await any_engine.http.post("/generate", json=any_engine.body(unknown_field=1))
    assert ignored.status_code == 200
    wrong = await any_engine.http.get("/generate")
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    nowhere = await any_engine.http.get("/nope")
    assert (nowhere.status_code, nowhere.json()) == (404, {"detail": "Not Found"})


async def test_a_streamed_refusal_is_an_event_of_a_successful_answer(
    any_engine: ServedEngine,
) -> None:
    call = {"input_ids": [5] * 9000, "stream": True}
    streamed = await any_engine.http.post("/generate", json=call)
    first = json.loads(streamed.text.split("\n")[0].removeprefix("data: "))
    assert streamed.status_code == 200
    assert first == {
        "error": {
            "message": LONG, "type": "invalid_request_error", "code": 400, "retryable": False,
        }
    }  # fmt: skip
