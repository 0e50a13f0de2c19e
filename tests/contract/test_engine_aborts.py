"""Ids in flight, aborts and the queue of every engine."""

import httpx

from tests.support.served_engine import ServedEngine

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
RAN_ONLY = {"prompt_tokens", "num_retractions", "cached_tokens", "cached_tokens_details"}


async def test_duplicate_rid_and_abort_with_partial_tokens(any_engine: ServedEngine) -> None:
    first = any_engine.long_call("dup")
    await any_engine.until_load(running=1)
    second = await any_engine.http.post("/generate", json=any_engine.body(rid="dup"))
    assert second.status_code == 400
    assert second.json() == {"error": {"message": "Duplicate request ID detected: dup"}}
    for other in ("other", "du"):  # neither is the id of a request
        answer = await any_engine.http.post("/abort_request", json={"rid": other})
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await any_engine.http.post("/abort_request", json={})).status_code == 200
    assert not first.done()
    assert (await any_engine.http.post("/abort_request", json={"rid": "dup"})).status_code == 200
    answer = await first
    meta = answer.json()["meta_info"]
    assert answer.status_code == 200
    assert meta["finish_reason"] == ABORTED
    assert 0 < meta["completion_tokens"] == len(meta["output_token_logprobs"]) < 4000
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer.json()["output_ids"]
    # No two calls of a run share an id: SGLang may mix up what it still owes of an aborted one.
    assert (await any_engine.generate(rid="dup-2"))["meta_info"]["id"] == "dup-2"


async def test_an_abort_ends_what_its_id_prefixes(any_engine: ServedEngine) -> None:
    calls = [any_engine.long_call(rid) for rid in ("ab", "abc")]
    await any_engine.until_load(running=2)
    await any_engine.http.post("/abort_request", json={"rid": "ab"})
    for call in calls:
        assert (await call).json()["meta_info"]["finish_reason"] == ABORTED


async def test_queue_full_and_abort_in_the_queue(any_engine: ServedEngine) -> None:
    running = [any_engine.long_call(f"run{number}") for number in range(4)]
    await any_engine.until_load(running=4)
    room = any_engine.max_queued
    queued = [any_engine.long_call(f"que{number}", return_logprob=False) for number in range(room)]
    await any_engine.until_load(running=4, waiting=room)
    refused = await any_engine.http.post("/generate", json=any_engine.body())
    assert refused.status_code == 503
    told = refused.json()
    assert (told["object"], told["message"], told["code"]) == (
        "error", "The request queue is full.", 503,
    )  # fmt: skip
    for number, call in enumerate(queued):
        await any_engine.http.post("/abort_request", json={"rid": f"que{number}"})
        answer = (await call).json()
        assert answer["output_ids"] == []
        assert not RAN_ONLY & set(answer["meta_info"])
        assert answer["meta_info"]["finish_reason"] == IN_QUEUE
    await any_engine.http.post("/abort_request", json={"abort_all": True})
    assert [(await call).json()["meta_info"]["finish_reason"] for call in running] == [ABORTED] * 4


async def test_a_lost_client_frees_its_slot(any_engine: ServedEngine) -> None:
    async with httpx.AsyncClient(base_url=any_engine.url, timeout=50) as other:
        call = any_engine.long_call("lost", client=other)
        await any_engine.until_load(running=1)
        call.cancel()
    await any_engine.until_load(running=0)
