"""What an answer of ``/generate`` must not be: it would be trained on, so nothing is guessed."""

import math

from activities.wire.contract import GenerateRequest, GenerateResponse
from models.sample import FinishReason


def answer_problem(
    request: GenerateRequest, answer: GenerateResponse, vocab_size: int
) -> str | None:
    """What the contract forbids in ``answer``, naming the field; None when nothing is wrong.

    An answer without tokens is legal for a request that was aborted in the queue. An engine leaves
    out of it what it has nothing to say on.
    """
    meta, ids = answer.meta_info, answer.output_ids
    reason = meta.finish_reason.get("type")
    if meta.id != request.rid:
        return f"meta_info.id is {meta.id}"
    if not meta.weight_version:
        return "meta_info.weight_version is empty"
    if reason not in tuple(FinishReason):
        return f"meta_info.finish_reason.type is {reason!r}"
    if not ids and reason != FinishReason.ABORT:
        return "output_ids is empty"
    if len(ids) > request.sampling_params.max_new_tokens:
        return f"output_ids has {len(ids)} tokens, more than max_new_tokens"
    return _tokens_problem(request, answer, vocab_size) if ids else None


def _tokens_problem(
    request: GenerateRequest, answer: GenerateResponse, vocab_size: int
) -> str | None:
    """What is wrong with the tokens of an answer and their log-probs."""
    meta, ids = answer.meta_info, answer.output_ids
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"output_ids holds a token outside [0, {vocab_size}): {min(ids)} or {max(ids)}"
    if not request.return_logprob:
        return None
    entries = meta.output_token_logprobs
    if entries is None or len(entries) != len(ids):
        found = "missing" if entries is None else f"{len(entries)} long"
        return f"meta_info.output_token_logprobs is {found} for {len(ids)} output_ids"
    for position, (logprob, token_id, _) in enumerate(entries):
        if token_id != ids[position]:
            return (
                f"meta_info.output_token_logprobs[{position}] is of token {token_id}, "
                f"output_ids has {ids[position]}"
            )
        if not math.isfinite(logprob):
            return f"meta_info.output_token_logprobs[{position}] is {logprob}"
    return None
