"""What must never be sent to ``/generate``: some of it ends the engine, the rest is misunderstood.

A token id outside the vocabulary fails an assertion on the GPU and takes every live request with
it. A number that does not fit the engine's tensors does the same. An unknown sampling key is
answered 500, and a float that JSON cannot hold arrives as null, which means the default.
"""

import math

from activities.wire.contract import RID_PATTERN, GenerateRequest, SamplingParams

MAX_TOP_K = 1 << 30
"""Means the whole vocabulary to an engine, which holds it as int32."""
MAX_SEED = (1 << 63) - 1
"""Seeds are held as int64."""


def request_problem(request: GenerateRequest, vocab_size: int, context_length: int) -> str | None:
    """Why ``request`` must not be sent; None when it may.

    Args:
        request: what would be sent.
        vocab_size: of the model's config, in tokens. A tokenizer may know fewer or more.
        context_length: prompt and response of one request, in tokens.
    """
    ids, sampling = request.input_ids, request.sampling_params
    if RID_PATTERN.fullmatch(request.rid) is None:
        return f"rid is {request.rid!r}, not 32 hexadecimal digits"
    if not ids:
        return "input_ids is empty"
    if min(ids) < 0 or max(ids) >= vocab_size:
        return (
            f"input_ids holds a token outside [0, {vocab_size}): "
            f"lowest {min(ids)}, highest {max(ids)}"
        )
    if not -1 <= request.logprob_start_len < len(ids):
        return f"logprob_start_len is {request.logprob_start_len} for {len(ids)} tokens"
    if request.stream:
        return "stream is true, and this client reads whole answers"
    new_tokens = sampling.max_new_tokens
    if new_tokens < 1:
        return f"max_new_tokens is {new_tokens}"
    if len(ids) + new_tokens > context_length:
        return (
            f"{len(ids)} prompt tokens and max_new_tokens {new_tokens} exceed the context of "
            f"{context_length} tokens"
        )
    return _sampling_problem(sampling, vocab_size)


def _sampling_problem(sampling: SamplingParams, vocab_size: int) -> str | None:
    unknown = sampling.__dict__.keys() - SamplingParams.model_fields.keys()
    if unknown:
        return f"sampling_params has unknown keys: {', '.join(sorted(unknown))}"
    if sampling.n != 1:
        return f"n is {sampling.n}, and this client reads one response"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}, outside (0, 1]"
    if sampling.top_k != -1 and not 1 <= sampling.top_k <= MAX_TOP_K:
        return f"top_k is {sampling.top_k}, neither -1 nor in [1, {MAX_TOP_K}]"
    if not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        return f"min_new_tokens is {sampling.min_new_tokens}, outside [0, max_new_tokens]"
    if sampling.min_new_tokens:  # the engine then writes at their places in a row of logits
        outside = [each for each in sampling.stop_token_ids or () if not 0 <= each < vocab_size]
        if outside:
            return f"stop_token_ids holds {outside[0]}, outside [0, {vocab_size})"
    if sampling.sampling_seed is not None and not 0 <= sampling.sampling_seed <= MAX_SEED:
        return f"sampling_seed is {sampling.sampling_seed}, outside [0, {MAX_SEED}]"
    return None
