"""``POST /generate``: from JSON to checked requests, refusing what SGLang refuses or dies of."""

import math
import secrets
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from workers.engines.native.answers import InternalError, PayloadError, ServerError, Wanted
from workers.engines.native.request import Request, Sampling
from workers.engines.native.text import TextCodec

GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy, as in SGLang."""
SEED_BITS = 63
SIBLING_STRIDE = 0x5DEECE66D
"""The i-th of ``n`` siblings of one seeded request draws from seed + i x this."""

SAMPLING_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "n": 1,
    "sampling_seed": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "stream_interval": None,
}
NEUTRAL_ONLY: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "logit_bias": None,
}
"""Keys that SGLang knows and this engine takes at their neutral value only."""
UNSUPPORTED_FIELDS = (
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
    "return_sampling_mask",
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must stay inside."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    codec: TextCodec


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP call: its requests, and how to answer."""

    requests: list[Request]
    wanted: Wanted
    stream: bool
    as_list: bool


def parse_body(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises ServerError (shape B) for anything else, an absent body included."""
    if not raw:
        raise ServerError("1 validation error: body: Field required")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ServerError(f"1 validation error: body: JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise ServerError("1 validation error: body: Input should be a valid dictionary")
    return body


def parse_generate(body: dict[str, Any], bounds: Bounds) -> Job:
    """Check a ``/generate`` body. Raises PayloadError in one of its three shapes."""
    told = body.get("sampling_params") or {}
    if not isinstance(told, dict):
        raise ServerError("1 validation error: sampling_params: Input should be a dictionary")
    for name in UNSUPPORTED_FIELDS:
        if body.get(name):
            raise PayloadError(f"{name} is not supported by the native engine.")
    if body.get("lora_path"):
        raise PayloadError(
            f"LoRA adapter {body['lora_path']!r} was requested, but LoRA is not enabled."
        )
    prompts, as_list = _prompts(body, bounds)
    sampling, num_samples = _sampling(told, bounds)
    start = _field(body, "logprob_start_len", int, -1)
    scored = _field(body, "return_logprob", bool, False) and start >= 0
    rids = _rids(body, len(prompts))
    requests = []
    for prompt, rid in zip(prompts, rids, strict=True):
        _check_prompt(prompt, sampling, bounds)
        if scored and start > len(prompt):
            raise PayloadError(
                f"req.logprob_start_len={start} is higher than the number of input tokens"
                f" len(req.origin_input_ids)={len(prompt)}. Please use a smaller logprob_start_len."
            )
        requests += [
            Request(
                rid=rid if num_samples == 1 else f"{rid}_{uuid4().hex}",
                input_ids=prompt,
                sampling=_with_seed(sampling, told.get("sampling_seed"), sibling),
                prompt_logprobs_from=start if scored else None,
                want_experts=_field(body, "return_routed_experts", bool, False),
                stream=_field(body, "stream", bool, False),
                arrived=time.monotonic(),
            )
            for sibling in range(num_samples)
        ]
    wanted = Wanted(
        logprobs=_field(body, "return_logprob", bool, False),
        skip_special=bool(told.get("skip_special_tokens", True)),
        trim_stop=not told.get("no_stop_trim", False),
        prompt_ids=_field(body, "return_prompt_token_ids", bool, False),
        experts_from=_field(body, "routed_experts_start_len", int, 0),
    )
    stream = _field(body, "stream", bool, False)
    return Job(requests, wanted, stream, as_list or num_samples > 1)


def _field(body: dict[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """A typed field; null counts as absent. Raises ServerError for a wrong JSON type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ServerError(f"1 validation error: {name}: Input should be a valid {kind.__name__}")
    return value


def _prompts(body: dict[str, Any], bounds: Bounds) -> tuple[list[list[int]], bool]:
    """The prompts and whether the caller sent a batch."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise PayloadError("Either text, input_ids or input_embeds should be provided.")
    if ids is None:
        texts: list[Any] = text if isinstance(text, list) else [text]
        if not all(isinstance(item, str) for item in texts):
            raise ServerError("1 validation error: text: Input should be a valid string")
        if not bounds.codec.available:
            raise PayloadError(
                "text needs a tokenizer, and the model folder has none: send input_ids."
            )
        return [bounds.codec.encode(item) for item in texts], isinstance(text, list)
    if not isinstance(ids, list):
        raise ServerError("1 validation error: input_ids: Input should be a valid list")
    if not ids:
        raise PayloadError("input_ids cannot be empty.")
    batch = isinstance(ids[0], list)
    prompts = ids if batch else [ids]
    for prompt in prompts:
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ServerError("1 validation error: input_ids: elements must be int or list")
    return prompts, batch


def _rids(body: dict[str, Any], count: int) -> list[str]:
    rid = body.get("rid")
    if rid is None:
        return [uuid4().hex for _ in range(count)]
    rids = rid if isinstance(rid, list) else [rid]
    if not all(isinstance(item, str) and item for item in rids):
        raise ServerError("1 validation error: rid: Input should be a valid string")
    if isinstance(rid, str) and count > 1:
        return [f"{rid}_{number}" for number in range(count)]
    if len(rids) != count or len(set(rids)) != count:
        raise PayloadError(f"rid must hold {count} different ids, one for each prompt.")
    return rids


def _check_prompt(prompt: list[int], sampling: Sampling, bounds: Bounds) -> None:
    """Lengths and ids. SGLang's process dies of an id outside the vocabulary; this refuses it."""
    if not prompt:
        raise PayloadError("input_ids cannot be empty.")
    limit, length = bounds.context_length, len(prompt)
    if length >= limit:
        raise PayloadError(
            f"The input ({length} tokens) is longer than the model's context length"
            f" ({limit} tokens)."
        )
    total = length + sampling.max_new_tokens
    if total > limit:
        raise PayloadError(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens."
            f" You requested a total of {total} tokens: {length} tokens from the input messages and"
            f" {sampling.max_new_tokens} tokens for the completion. Please reduce the number of"
            " tokens in the input messages or the completion to fit within the limit."
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= bounds.vocab_size:
        raise PayloadError(
            f"input_ids holds token id {low if low < 0 else high}, but the vocabulary has"
            f" {bounds.vocab_size} ids."
        )


def _sampling(told: dict[str, Any], bounds: Bounds) -> tuple[Sampling, int]:
    """Checked parameters without a seed, and the number of samples."""
    for key, value in told.items():
        if key in NEUTRAL_ONLY:
            if value is not None and value != NEUTRAL_ONLY[key]:
                raise PayloadError(f"{key} is not supported by the native engine.")
        elif key not in SAMPLING_DEFAULTS:
            raise InternalError(f"unknown sampling parameter {key}")
    values = SAMPLING_DEFAULTS | {k: v for k, v in told.items() if v is not None}
    temperature, top_p = _number(values, "temperature"), _number(values, "top_p")
    min_p, top_k = _number(values, "min_p"), _integer(values, "top_k")
    most, least = _integer(values, "max_new_tokens"), _integer(values, "min_new_tokens")
    if not 0 <= temperature < math.inf:
        raise PayloadError(
            f"temperature must be a non-negative finite number, got {told['temperature']}."
        )
    if not 0 < top_p <= 1:
        raise PayloadError(f"top_p must be in (0, 1], got {top_p}.")
    if not 0 <= min_p <= 1:
        raise PayloadError(f"min_p must be in [0, 1], got {min_p}.")
    if top_k < 1 and top_k != -1:
        raise PayloadError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    if most < 0:
        raise PayloadError(f"max_new_tokens must be at least 0, got {most}.")
    if not 0 <= least <= most:
        raise PayloadError(f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}.")
    num_samples = _integer(values, "n")
    if num_samples < 1:
        raise PayloadError(f"n must be at least 1, got {num_samples}.")
    # With ignore_eos SGLang looks at no stop token at all, the caller's own included.
    stops = () if values["ignore_eos"] else _stop_ids(values, bounds)
    sampling = Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_new_tokens=most,
        min_new_tokens=least,
        stop_token_ids=stops,
        stop_strings=_stop_strings(values, bounds),
        seed=0,
    )
    return sampling, num_samples


def _stop_ids(values: dict[str, Any], bounds: Bounds) -> tuple[int, ...]:
    told = values["stop_token_ids"] or []
    if not isinstance(told, list) or not all(type(token) is int for token in told):
        raise PayloadError("stop_token_ids must be a list of integers.")
    inside = (token for token in told if 0 <= token < bounds.vocab_size)
    return tuple(sorted({*inside, *bounds.eos_token_ids}))


def _stop_strings(values: dict[str, Any], bounds: Bounds) -> tuple[str, ...]:
    told = values["stop"]
    strings = [told] if isinstance(told, str) else told or []
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise PayloadError("stop must be a string or a list of strings.")
    strings = [text for text in strings if text]
    if strings and not bounds.codec.available:
        raise PayloadError("stop needs a tokenizer, and the model folder has none.")
    return tuple(strings)


def _number(values: dict[str, Any], key: str) -> float:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PayloadError(f"{key} must be a number, got {value!r}.")
    return float(value)


def _integer(values: dict[str, Any], key: str) -> int:
    value = values[key]
    if type(value) is not int:
        raise PayloadError(f"{key} must be an integer, got {value!r}.")
    return value


def _with_seed(sampling: Sampling, seed: int | None, sibling: int) -> Sampling:
    if seed is None:
        value = secrets.randbits(SEED_BITS)
    elif type(seed) is int:
        value = (seed + sibling * SIBLING_STRIDE) % 2**SEED_BITS
    else:
        raise PayloadError(f"sampling_seed must be an integer, got {seed!r}.")
    parts = {name: getattr(sampling, name) for name in Sampling.__slots__}
    return Sampling(**(parts | {"seed": value}))
