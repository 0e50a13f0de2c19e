"""Which policy version sampled each token of a response: one normal form, and its validation.

A record that is wrong here would be trained on in silence as if another policy had sampled it, so
every violation ends the run. Spans are half-open and relative to the response. The replay version
is that of the forward that made the last token, and with it the route table.

    length 10, replay version 7
    {5, 0, 4} {7, 4, 10}             mixed: four tokens of version 5, six of version 7
    {5, 0, 4} {6, 4, 10}             refused: ends below the replay version
    {7, 0, 4} {6, 4, 10}             refused: versions fall
"""

import math
import re
from collections.abc import Mapping, Sequence

from models.errors import ContractViolation
from models.sample import FinishReason, Sample, TokenSpan

SPAN_KEYS = frozenset({"version", "start", "end"})
ROUTE_BYTES = 4
"""Of one routed expert: int32."""

_DIGITS = re.compile("[0-9]{1,18}")  # whatever an int64 holds


def parse_version(value: object) -> int:
    """A policy version as engines tell it: a non-negative int, or ASCII digits.

    Raises:
        ContractViolation: anything else, a bool included.
    """
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    raise ContractViolation(f"{value!r} is no policy version (an int >= 0 or its ASCII digits)")


def normalize(spans: Sequence[object], length: int, replay_version: int) -> list[TokenSpan]:
    """``spans`` without empty ones, neighbors of one version merged.

    Args:
        spans: ``TokenSpan`` or mappings of exactly ``version``, ``start`` and ``end``.
        length: Response tokens.
        replay_version: Version of the forward that made the last token.

    Raises:
        ContractViolation: spans that do not cover [0, length) one after the other with versions
            that never fall and end at ``replay_version``; names the span.
    """
    if length < 1:
        raise ContractViolation("the response has no tokens")
    if not spans:
        raise ContractViolation("spans: there is none, so nobody knows which version sampled it")
    found: list[TokenSpan] = []
    at = 0
    for position, told in enumerate(spans):
        span = _span(told, f"spans[{position}]")
        if span.start != at:
            raise ContractViolation(f"spans[{position}].start is {span.start}, expected {at}")
        if not at <= span.end <= length:
            raise ContractViolation(
                f"spans[{position}].end is {span.end}, outside [{at}, {length}]"
            )
        at = span.end
        if span.start == span.end:
            continue
        _check_version(span, found, replay_version, f"spans[{position}]")
        if found and found[-1].version == span.version:
            found[-1] = TokenSpan(span.version, found[-1].start, span.end)
        else:
            found.append(span)
    if at != length:
        raise ContractViolation(f"spans end at {at}, the response has {length} tokens")
    if found[-1].version != replay_version:
        raise ContractViolation(
            f"spans end at version {found[-1].version}, the last forward was of version "
            f"{replay_version}"
        )
    return found


def check_sample(sample: Sample) -> None:
    """Refuse a response whose tokens do not all have a log-prob and a behavior version.

    The log-prob of a token that the loss mask leaves out may be anything.

    Raises:
        ContractViolation: names group, sample and field.
    """
    problem = _sample_problem(sample)
    if problem is None:
        try:
            spans = normalize(
                sample.spans, len(sample.response_token_ids), sample.spans[-1].version
            )
        except ContractViolation as error:
            problem = error.message
        else:
            problem = None if spans == sample.spans else "spans are not in normal form"
    if problem is not None:
        raise ContractViolation(
            f"prompt group {sample.group_index}, sample {sample.sample_index}: {problem}"
        )


def routes_problem(routes: bytes, num_tokens: int) -> str | None:
    """Why ``routes`` is no int32 [num_tokens - 1, layers, top_k]; None when it can be one.

    ``num_tokens`` counts prompt and response; the last token was fed to no forward.
    """
    rows = num_tokens - 1
    if rows < 1 or not routes or len(routes) % (ROUTE_BYTES * rows):
        return f"routed_experts has {len(routes)} bytes, no int32 table of {rows} rows"
    return None


def _sample_problem(sample: Sample) -> str | None:
    """What is wrong besides the spans."""
    ids, logprobs = sample.response_token_ids, sample.logprobs
    if not ids:
        return "response_token_ids is empty"
    if len(logprobs) != len(ids):
        return f"logprobs has {len(logprobs)} values for {len(ids)} response tokens"
    problem = _mask_problem(sample)
    if problem is not None:
        return problem
    if not all(map(math.isfinite, logprobs)):  # without a line of Python for each token
        active = sample.loss_mask or [1] * len(ids)
        for position, (logprob, counts) in enumerate(zip(logprobs, active, strict=True)):
            if counts and not math.isfinite(logprob):
                return f"logprobs[{position}] is {logprob}"
    if sample.finish_reason is FinishReason.ABORT:
        return "finish_reason is abort: the response is partial"
    if not sample.spans:
        return "spans: there is none, so nobody knows which version sampled it"
    if sample.routed_experts is not None:
        return routes_problem(sample.routed_experts, len(sample.prompt_token_ids) + len(ids))
    return None


def _mask_problem(sample: Sample) -> str | None:
    """What is wrong with the loss mask, if there is one."""
    mask, length = sample.loss_mask, len(sample.response_token_ids)
    if mask is None:
        return None
    if len(mask) != length:
        return f"loss_mask has {len(mask)} values for {length} response tokens"
    for position, value in enumerate(mask):
        if value not in (0, 1):
            return f"loss_mask[{position}] is {value}, neither 0 nor 1"
    return None


def _span(told: object, where: str) -> TokenSpan:
    if isinstance(told, TokenSpan):
        version, start, end = told.version, told.start, told.end
    elif isinstance(told, Mapping) and told.keys() == SPAN_KEYS:
        version, start, end = told["version"], told["start"], told["end"]
    else:
        raise ContractViolation(f"{where} is {told!r}, expected exactly version, start and end")
    if type(start) is not int or type(end) is not int:
        raise ContractViolation(f"{where}: start and end are {start!r} and {end!r}, not ints")
    try:
        return TokenSpan(parse_version(version), start, end)
    except ContractViolation as error:
        raise ContractViolation(f"{where}.version: {error.message}") from error


def _check_version(
    span: TokenSpan, before: Sequence[TokenSpan], replay_version: int, where: str
) -> None:
    if before and span.version < before[-1].version:
        raise ContractViolation(
            f"{where}.version falls from {before[-1].version} to {span.version}"
        )
    if span.version > replay_version:
        raise ContractViolation(
            f"{where}.version is {span.version}, above the last forward's {replay_version}"
        )
