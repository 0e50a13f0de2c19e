"""``/generate`` and ``/abort_request`` of the real process, as recorded from SGLang 0.5.17."""

import base64
import json
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

# Field names, in order, of recorded answers.
PLAIN_META = (
    *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions"),
    *("reasoning_tokens", "completion_tokens", "cached_tokens", "cached_tokens_details"),
    *("dp_rank", "e2e_latency", "response_sent_to_client_ts"),
)
LOGPROB_META = [
    *PLAIN_META[:5],
    "input_token_logprobs",
    "output_token_logprobs",
    "output_token_logprobs_length",
    *PLAIN_META[5:],
]
QUEUED_META = [
    name
    for name in PLAIN_META
    if name not in {"prompt_tokens", "num_retractions", "cached_tokens", "cached_tokens_details"}
]
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
PROMPT = [1, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]


async def test_answer_has_the_recorded_fields(engine: Any) -> None:
    plain = await engine.generate()
    assert list(plain) == ["text", "output_ids", "meta_info"]
    assert tuple(plain["meta_info"]) == PLAIN_META
    scored = await engine.generate(return_logprob=True, rid="my-rid-1")
    meta = scored["meta_info"]
    assert list(meta) == LOGPROB_META
    assert meta["id"] == "my-rid-1"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (12, 4)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == scored["output_ids"]
    assert all(entry[0] < 0 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert meta["input_token_logprobs"] == []
    assert scored["output_ids"] == plain["output_ids"]


async def test_scoring_batches_and_siblings(engine: Any) -> None:
    scored = await engine.generate(max_new_tokens=0, return_logprob=True, logprob_start_len=0)
    assert scored["output_ids"] == []
    prompt = scored["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in prompt] == PROMPT
    assert prompt[0][0] is None
    assert all(entry[0] < 0 for entry in prompt[1:])
    seeded = {"n": 3, "temperature": 1, "sampling_seed": 5}
    siblings = await engine.generate(rid="r" * 32, sampling_params=seeded)
    again = await engine.generate(rid="q" * 32, sampling_params=seeded)
    assert isinstance(siblings, list)
    assert all(sample["meta_info"]["id"].startswith("r" * 32 + "_") for sample in siblings)
    assert len({tuple(sample["output_ids"]) for sample in siblings}) == 3
    assert [s["output_ids"] for s in siblings] == [s["output_ids"] for s in again]
    batch = await engine.http.post(
        "/generate", json=engine.body() | {"input_ids": [PROMPT, PROMPT[:5]]}
    )
    assert [sample["meta_info"]["prompt_tokens"] for sample in batch.json()] == [12, 5]


async def test_routed_experts_have_one_row_a_fed_token(engine: Any) -> None:
    whole = await engine.generate(max_new_tokens=3, return_routed_experts=True)
    data = base64.b64decode(whole["meta_info"]["routed_experts"])
    assert len(data) == (12 + 3 - 1) * 2 * 2 * 4
    cut = await engine.generate(
        max_new_tokens=3, return_routed_experts=True, routed_experts_start_len=12
    )
    assert base64.b64decode(cut["meta_info"]["routed_experts"]) == data[12 * 2 * 2 * 4 :]
    assert "routed_experts" not in (await engine.generate())["meta_info"]


async def test_stop_tokens_and_strings(engine: Any) -> None:
    free = await engine.generate(max_new_tokens=30)
    ids = free["output_ids"]
    stop_id = ids[9]
    told = {"ignore_eos": False, "stop_token_ids": [stop_id]}
    stopped = await engine.generate(max_new_tokens=30, sampling_params=told)
    length = ids.index(stop_id) + 1
    assert stopped["output_ids"] == ids[:length]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    tokenizer = Tokenizer.from_file(str(engine.folders[0] / "tokenizer.json"))
    assert free["text"] == tokenizer.decode(ids)
    assert stopped["text"] == tokenizer.decode(ids[: length - 1])
    string = next(
        text for text in (tokenizer.decode([token]) for token in ids[3:]) if text.isascii() and text
    )
    cut = await engine.generate(max_new_tokens=30, sampling_params={"stop": [string]})
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": string}
    assert cut["text"] == free["text"][: free["text"].index(string)]
    assert ids[: len(cut["output_ids"])] == cut["output_ids"]


async def test_stream_is_cumulative_and_equals_the_answer(engine: Any) -> None:
    whole = await engine.generate(max_new_tokens=6, return_logprob=True)
    call = engine.body(6, return_logprob=True, stream=True)
    async with engine.http.stream("POST", "/generate", json=call) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    chunks = [line.removeprefix("data: ") for line in lines]
    assert chunks[-1] == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks[:-1]]
    assert [len(chunk["output_ids"]) for chunk in parsed] == [1, 2, 3, 4, 5, 6]
    assert [c["meta_info"]["finish_reason"] for c in parsed[:-1]] == [None] * 5
    assert parsed[-1]["output_ids"] == whole["output_ids"]
    assert parsed[-1]["text"] == whole["text"]
    assert list(parsed[0]["meta_info"]) == [n for n in LOGPROB_META if n != "e2e_latency"]


LONG = "The input (9000 tokens) is longer than the model's context length (4096 tokens)."
TOTAL = (
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You"
    " requested a total of 4190 tokens: 100 tokens from the input messages and 4090 tokens for the"
    " completion. Please reduce the number of tokens in the input messages or the completion to"
    " fit within the limit."
)
SHAPE_A = {
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
        {"input_ids": PROMPT, "sampling_params": {"top_p": 2}},
        "top_p must be in (0, 1], got 2.0.",
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
    # This one ends SGLang's process; here it is refused.
    "outside the vocabulary": (
        {"input_ids": [5, 320]},
        "input_ids holds token id 320, but the vocabulary has 320 ids.",
    ),
}


@pytest.mark.parametrize("name", SHAPE_A)
async def test_refusals_of_shape_a(engine: Any, name: str) -> None:
    told, message = SHAPE_A[name]
    answer = await engine.http.post("/generate", json=told)
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": message}})


async def test_refusals_of_shapes_b_and_c(engine: Any) -> None:
    for content in ('{"input_ids": ["a"]}', '{"input_ids": [5], "sampling_params": "x"}', "{bad"):
        answer = await engine.http.post("/generate", content=content)
        told = answer.json()
        assert answer.status_code == 400
        assert list(told) == ["object", "message", "type", "param", "code"]
        assert (told["object"], told["type"], told["param"], told["code"]) == (
            "error", "Bad Request", None, 400,
        )  # fmt: skip
    unknown = await engine.http.post("/generate", json=engine.body(sampling_params={"heat": 1}))
    assert (unknown.status_code, unknown.text) == (500, "Internal Server Error")
    assert (
        await engine.http.post("/generate", json=engine.body(unknown_field=1))
    ).status_code == 200
    wrong = await engine.http.get("/generate")
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    nowhere = await engine.http.get("/nope")
    assert (nowhere.status_code, nowhere.json()) == (404, {"detail": "Not Found"})
    mode = await engine.http.post("/pause_generation", json={"mode": "zzz"})
    assert (mode.status_code, mode.json()["object"]) == (400, "error")
    streamed = await engine.http.post("/generate", json={"input_ids": [5] * 9000, "stream": True})
    first = json.loads(streamed.text.split("\n")[0].removeprefix("data: "))
    assert streamed.status_code == 200
    assert first == {
        "error": {
            "message": LONG, "type": "invalid_request_error", "code": 400, "retryable": False,
        }
    }  # fmt: skip


async def test_duplicate_rid_and_abort_with_partial_tokens(engine: Any) -> None:
    first = engine.long_call("dup")
    await engine.until_load(running=1)
    second = await engine.http.post("/generate", json=engine.body(rid="dup"))
    assert second.status_code == 400
    assert second.json() == {"error": {"message": "Duplicate request ID detected: dup"}}
    assert (await engine.http.post("/abort_request", json={"rid": "other"})).status_code == 200
    # Ids match by prefix, as in SGLang.
    assert (await engine.http.post("/abort_request", json={"rid": "du"})).status_code == 200
    answer = await first
    meta = answer.json()["meta_info"]
    assert answer.status_code == 200
    assert meta["finish_reason"] == ABORTED
    assert 0 < meta["completion_tokens"] == len(meta["output_token_logprobs"]) < 4000
    assert (await engine.generate(rid="dup"))["meta_info"]["id"] == "dup"


async def test_queue_full_and_abort_in_the_queue(engine: Any) -> None:
    running = [engine.long_call(f"run{number}") for number in range(4)]
    await engine.until_load(running=4)
    queued = [engine.long_call(f"que{number}", return_logprob=False) for number in range(4)]
    await engine.until_load(running=4, waiting=4)
    refused = await engine.http.post("/generate", json=engine.body())
    assert refused.status_code == 503
    assert refused.json()["object"] == "error"
    assert refused.json()["message"] == "The request queue is full."
    assert refused.json()["code"] == 503
    await engine.http.post("/abort_request", json={"rid": "que"})
    for call in queued:
        answer = (await call).json()
        assert answer["output_ids"] == []
        assert list(answer["meta_info"]) == QUEUED_META
        assert answer["meta_info"]["finish_reason"] == ABORTED | {
            "message": "Abort in waiting queue"
        }
    await engine.http.post("/abort_request", json={"abort_all": True})
    assert [(await call).json()["meta_info"]["finish_reason"] for call in running] == [ABORTED] * 4


async def test_lost_client_frees_its_slot(engine: Any) -> None:
    async with httpx.AsyncClient(base_url=engine.http.base_url, timeout=50) as other:
        call = engine.long_call("lost", client=other)
        await engine.until_load(running=1)
        call.cancel()
    await engine.until_load(running=0)
