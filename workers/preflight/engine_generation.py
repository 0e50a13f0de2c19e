"""What an engine must answer to requests that are as they should be."""

import base64
import json
import math
from typing import Any
from uuid import uuid4

from activities.wire.contract import ABORT_REQUEST, GENERATE
from activities.wire.probe import Reply
from workers.preflight.engine import Check, Seen, Subject

PROMPT = [3, 4, 5, 6, 7, 5, 3, 6]
"""Small ids, which every vocabulary has."""
NEW_TOKENS = 8
SCORED_TOKENS = 32
MAX_MEAN_GAP = 0.1
"""Of log-probs at sampling and at scoring: bfloat16 stays well below, other weights far above."""
MANY_TOKENS = 1024
INT32_BYTES = 4


def _body(new_tokens: int, temperature: float = 0.0, **told: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": new_tokens, "temperature": temperature, "ignore_eos": True}
    sampling |= told.pop("sampling_params", {})
    return {"input_ids": PROMPT, "sampling_params": sampling} | told


async def _answer(subject: Subject, body: dict[str, Any]) -> tuple[dict[str, Any], Reply]:
    """The answer as an object with ``output_ids`` and ``meta_info``, empty when it has none."""
    reply = await subject.probe.post(GENERATE, body)
    told = reply.json() if reply.status == 200 else None
    answer = told if isinstance(told, dict) else {}
    return {"output_ids": [], "meta_info": {}} | answer, reply


def _refusal(reply: Reply) -> Seen:
    return Seen(f"{reply.status}: {reply.text[:90]}", False)


def _logprobs(meta: dict[str, Any], field: str) -> list[Any]:
    return [entry[0] for entry in meta.get(field) or []]


async def _by_ids(subject: Subject) -> Seen:
    rid = uuid4().hex
    answer, reply = await _answer(subject, _body(NEW_TOKENS, rid=rid))
    if reply.status != 200:
        return _refusal(reply)
    meta, ids = answer["meta_info"], answer["output_ids"]
    reason = meta.get("finish_reason")
    ok = len(ids) == NEW_TOKENS and reason == {"type": "length", "length": NEW_TOKENS}
    ok = ok and meta.get("id") == rid and meta.get("prompt_tokens") == len(PROMPT)
    return Seen(f"{len(ids)} ids, {json.dumps(reason)}", ok)


async def _version(subject: Subject) -> Seen:
    answer, reply = await _answer(subject, _body(1))
    if reply.status != 200:
        return _refusal(reply)
    told = answer["meta_info"].get("weight_version")
    return Seen(repr(told), told == subject.model.get("weight_version"))


async def _with_logprobs(subject: Subject) -> Seen:
    answer, reply = await _answer(subject, _body(NEW_TOKENS, 1.0, return_logprob=True))
    if reply.status != 200:
        return _refusal(reply)
    entries = answer["meta_info"].get("output_token_logprobs") or []
    values = [entry[0] for entry in entries]
    of_them = [entry[1] for entry in entries] == answer["output_ids"] != []
    ok = of_them and all(math.isfinite(value) and value <= 0 for value in values)
    return Seen(f"{len(values)} values, {'of the same ids' if of_them else 'of others'}", ok)


async def _peaked(subject: Subject) -> Seen:
    """An untied head that was never loaded makes every token equally likely."""
    answer, reply = await _answer(subject, _body(NEW_TOKENS, 1.0, return_logprob=True))
    values = _logprobs(answer["meta_info"], "output_token_logprobs")
    if not values:
        return _refusal(reply)
    spread = max(values) - min(values)
    return Seen(f"they spread over {spread:.2f}", spread > 1e-3)


async def _scored(subject: Subject) -> Seen:
    sampled, reply = await _answer(subject, _body(SCORED_TOKENS, 1.0, return_logprob=True))
    told = _logprobs(sampled["meta_info"], "output_token_logprobs")
    if not told:
        return _refusal(reply)
    whole = [*PROMPT, *sampled["output_ids"]]
    scoring = _body(0, return_logprob=True, logprob_start_len=0) | {"input_ids": whole}
    scored, reply = await _answer(subject, scoring)
    values = _logprobs(scored["meta_info"], "input_token_logprobs")
    if len(values) != len(whole) or values[0] is not None:
        return _refusal(reply)
    again = values[len(PROMPT) :]
    gap = sum(abs(a - b) for a, b in zip(told, again, strict=True)) / len(told)
    return Seen(f"mean gap {gap:.4f} over {len(told)} tokens", gap < MAX_MEAN_GAP)


async def _greedy(subject: Subject) -> Seen:
    first, reply = await _answer(subject, _body(NEW_TOKENS))
    second, _ = await _answer(subject, _body(NEW_TOKENS))
    if not first["output_ids"]:
        return _refusal(reply)
    same = first["output_ids"] == second["output_ids"]
    return Seen("the same ids" if same else "other ids", same)


async def _stops(subject: Subject) -> Seen:
    free, reply = await _answer(subject, _body(NEW_TOKENS))
    if not free["output_ids"]:
        return _refusal(reply)
    token = free["output_ids"][0]
    told = {"stop_token_ids": [token], "ignore_eos": False}
    stopped, _ = await _answer(subject, _body(NEW_TOKENS, sampling_params=told))
    reason = stopped["meta_info"].get("finish_reason")
    ok = stopped["output_ids"] == [token] and reason == {"type": "stop", "matched": token}
    return Seen(f"{len(stopped['output_ids'])} ids, {json.dumps(reason)}", ok)


async def _streams(subject: Subject) -> Seen:
    reply = await subject.probe.post(GENERATE, _body(NEW_TOKENS, stream=True))
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    whole, _ = await _answer(subject, _body(NEW_TOKENS))
    if len(events) < 2 or events[-1] != "[DONE]":
        return _refusal(reply)
    last = json.loads(events[-2])
    ok = last.get("output_ids") == whole["output_ids"]
    return Seen(f"{len(events) - 1} chunks, the last {'whole' if ok else 'another'}", ok)


async def _experts(subject: Subject) -> Seen:
    if subject.server.get("enable_return_routed_experts") is not True:
        return Seen("the server was not started for it", None)
    answer, reply = await _answer(subject, _body(NEW_TOKENS, return_routed_experts=True))
    told = answer["meta_info"].get("routed_experts")
    if not isinstance(told, str):
        return _refusal(reply)
    data, rows = base64.b64decode(told), len(PROMPT) + NEW_TOKENS - 1
    row_bytes, rest = divmod(len(data), rows * INT32_BYTES)
    return Seen(f"{rows} rows of {row_bytes}", rest == 0 and row_bytes > 0)


async def _aborts(subject: Subject) -> Seen:
    """A second request of the id is refused; the first keeps the tokens that it has."""
    rid = uuid4().hex
    room = max(subject.longest_input - len(PROMPT), 1)
    body = _body(min(MANY_TOKENS, room), rid=rid, return_logprob=True, stream=True)
    replies: list[Reply] = []

    async def repeat_then_abort() -> None:
        replies.append(await subject.probe.post(GENERATE, _body(1, rid=rid)))
        await subject.probe.post(ABORT_REQUEST, {"rid": rid})

    reply = await subject.probe.post_stream(GENERATE, body, repeat_then_abort)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    chunks = [json.loads(event) for event in events if event.startswith("{")]
    meta = chunks[-1].get("meta_info", {}) if chunks else {}
    reason = (meta.get("finish_reason") or {}).get("type")
    kept = len(meta.get("output_token_logprobs") or ())
    seen = Seen(f"the same id again: {replies[0].status}; {reason} after {kept} tokens", None)
    if reason == "length":
        return seen  # a small model had made all tokens before the abort came
    ok = reason == "abort" and 0 < kept == meta.get("completion_tokens")
    return seen._replace(ok=ok and replies[0].status == 400)


GENERATION = (
    Check("generate by token ids", f"{NEW_TOKENS} ids, finish length", _by_ids),
    Check("version of an answer", "the one of model_info", _version),
    Check("log-probs", "one a token, of the same ids", _with_logprobs),
    Check("log-probs differ", "no uniform distribution", _peaked),
    Check("scoring agrees with sampling", f"mean gap below {MAX_MEAN_GAP}", _scored),
    Check("greedy twice", "the same ids", _greedy),
    Check("stop token", "it ends the response", _stops),
    Check("stream", "cumulative, then [DONE]", _streams),
    Check("routed experts", "one row a fed token", _experts),
    Check("abort while running", "its tokens so far; its id is taken", _aborts),
)
