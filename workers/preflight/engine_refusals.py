"""What an engine must refuse, with the status and in the shape that the client knows."""

from typing import Any

from activities.wire.contract import GENERATE
from activities.wire.probe import Reply
from workers.preflight.engine import Check, Seen, Subject

SENTENCE = "400, one sentence"
STRUCTURED = "400, an error object"


def _brief(reply: Reply) -> str:
    return f"{reply.status}: {' '.join(reply.text.split())[:90]}"


def _is_sentence(reply: Reply) -> bool:
    """``{"error": {"message": ...}}``."""
    body = reply.json()
    error = body.get("error") if isinstance(body, dict) else None
    told = error.get("message") if isinstance(error, dict) else None
    return reply.status == 400 and isinstance(told, str)


def _is_structured(reply: Reply) -> bool:
    """``{"object": "error", "message", "type", "param", "code"}``."""
    body = reply.json()
    return reply.status == 400 and isinstance(body, dict) and body.get("object") == "error"


async def _refused(subject: Subject, body: dict[str, Any]) -> Seen:
    reply = await subject.probe.post(GENERATE, body)
    return Seen(_brief(reply), _is_sentence(reply))


async def _empty(subject: Subject) -> Seen:
    return await _refused(subject, {"input_ids": []})


async def _temperature(subject: Subject) -> Seen:
    return await _refused(
        subject, {"input_ids": [3, 4], "sampling_params": {"temperature": -1, "max_new_tokens": 1}}
    )


async def _too_long(subject: Subject) -> Seen:
    if not subject.longest_input:
        return Seen("the server does not tell its longest input", None)
    # Beyond every margin between the longest input and the context.
    return await _refused(subject, {"input_ids": [3] * (subject.longest_input + 64)})


async def _over_context(subject: Subject) -> Seen:
    if not subject.longest_input:
        return Seen("the server does not tell its longest input", None)
    asked = {"max_new_tokens": subject.longest_input + 64}
    return await _refused(subject, {"input_ids": [3] * 8, "sampling_params": asked})


async def _not_json(subject: Subject) -> Seen:
    reply = await subject.probe.post_text(GENERATE, "{bad")
    return Seen(_brief(reply), _is_structured(reply))


async def _wrong_types(subject: Subject) -> Seen:
    reply = await subject.probe.post(GENERATE, {"input_ids": ["a"]})
    return Seen(_brief(reply), _is_structured(reply))


async def _unknown_path(subject: Subject) -> Seen:
    reply = await subject.probe.get("/no/such/path")
    return Seen(f"{reply.status}", reply.status == 404)


REFUSALS = (
    Check("no token", SENTENCE, _empty),
    Check("temperature -1", SENTENCE, _temperature),
    Check("input longer than the context", SENTENCE, _too_long),
    Check("input and response longer", SENTENCE, _over_context),
    Check("a body that is no JSON", STRUCTURED, _not_json),
    Check("words for token ids", STRUCTURED, _wrong_types),
    Check("unknown path", "404", _unknown_path),
)
