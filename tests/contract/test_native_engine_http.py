"""``/generate`` of the native engine where it says more than the contract of all engines."""

import json

from tests.support.engine_model import PROMPT
from tests.support.served_engine import ServedEngine

# Field names, in order, of answers that were recorded from SGLang.
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


async def test_answers_have_the_recorded_fields_in_their_order(engine: ServedEngine) -> None:
    plain = await engine.generate()
    assert tuple(plain["meta_info"]) == PLAIN_META
    scored = await engine.generate(return_logprob=True)
    assert list(scored["meta_info"]) == LOGPROB_META
    running = [engine.long_call(f"run{number}") for number in range(4)]
    await engine.until_load(running=4)
    queued = engine.long_call("queued", return_logprob=False)
    await engine.until_load(running=4, waiting=1)
    await engine.http.post("/abort_request", json={"abort_all": True})
    assert list((await queued).json()["meta_info"]) == QUEUED_META
    for call in running:
        await call


async def test_a_seed_decides_and_siblings_of_one_differ(engine: ServedEngine) -> None:
    seeded = {"n": 3, "temperature": 1, "sampling_seed": 5}
    siblings = await engine.generate(rid="r" * 32, sampling_params=seeded)
    again = await engine.generate(rid="q" * 32, sampling_params=seeded)
    assert all(sample["meta_info"]["id"].startswith("r" * 32 + "_") for sample in siblings)
    assert len({tuple(sample["output_ids"]) for sample in siblings}) == 3
    assert [s["output_ids"] for s in siblings] == [s["output_ids"] for s in again]


async def test_a_stream_has_a_chunk_for_every_token(engine: ServedEngine) -> None:
    call = engine.body(6, return_logprob=True, stream=True)
    async with engine.http.stream("POST", "/generate", json=call) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    parsed = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [len(chunk["output_ids"]) for chunk in parsed] == [1, 2, 3, 4, 5, 6]
    assert list(parsed[0]["meta_info"]) == [n for n in LOGPROB_META if n != "e2e_latency"]


async def test_a_token_outside_the_vocabulary_is_refused(engine: ServedEngine) -> None:
    """It ends an SGLang server with all its requests."""
    answer = await engine.http.post("/generate", json={"input_ids": [*PROMPT, 320]})
    message = "input_ids holds token id 320, but the vocabulary has 320 ids."
    assert (answer.status_code, answer.json()) == (400, {"error": {"message": message}})
