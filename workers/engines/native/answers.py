"""Bodies of SGLang's answers: generation results and the three shapes of errors."""

import base64
import time
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.responses import PlainTextResponse, Response

from workers.engines.native.request import Finished, Request
from workers.engines.native.text import TextCodec


class PayloadError(Exception):
    """A request that is answered with an HTTP error. ``response`` is that answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.status = message, status

    def response(self) -> Response:
        """Shape A: one sentence."""
        return json_response({"error": {"message": self.message}}, self.status)


class ServerError(PayloadError):
    """Shape B: SGLang's API-server errors (wrong JSON types, 503)."""

    def response(self) -> Response:
        """Shape B with the status as its code."""
        kind = "Bad Request" if self.status == 400 else str(self.status)
        body = {"object": "error", "message": self.message, "type": kind, "param": None}
        return json_response(body | {"code": self.status}, self.status)


class InternalError(PayloadError):
    """Shape C: plain text. SGLang answers an unknown sampling key like this."""

    def response(self) -> Response:
        """Shape C."""
        return PlainTextResponse("Internal Server Error", 500)


def json_response(body: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(body), status, media_type="application/json")


@dataclass(slots=True)
class Progress:
    """What has arrived of a streamed response so far."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which optional parts of the answer were asked for."""

    logprobs: bool
    skip_special: bool
    trim_stop: bool
    prompt_ids: bool
    experts_from: int


def progress_body(
    request: Request, wanted: Wanted, so_far: Progress, version: str, codec: TextCodec
) -> dict[str, Any]:
    """A chunk of a stream: everything so far, no finish reason yet."""
    end = Finished({}, so_far.output_ids, so_far.logprobs, version, True)
    body = finished_body(request, wanted, end, codec)
    body["meta_info"]["finish_reason"] = None
    del body["meta_info"]["e2e_latency"]
    return body


def finished_body(
    request: Request, wanted: Wanted, end: Finished, codec: TextCodec
) -> dict[str, Any]:
    """The answer of one sample, field by field as SGLang builds it."""
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": end.finish_reason}
    if end.was_admitted:
        meta["prompt_tokens"] = len(request.input_ids)
    meta["weight_version"] = end.weight_version
    if end.was_admitted:
        meta["num_retractions"] = request.num_retractions
    if wanted.logprobs:
        prompt = request.input_logprobs or []
        meta["input_token_logprobs"] = [[value, token, None] for value, token in prompt]
        meta["output_token_logprobs"] = [
            [value, token, None] for value, token in zip(end.logprobs, end.output_ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(end.output_ids)
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = len(end.output_ids)
    if end.was_admitted:
        cached = request.cached_tokens
        meta["cached_tokens"] = cached
        meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
    if end.experts is not None:
        row_bytes = len(end.experts) // max(len(request.input_ids) + len(end.output_ids) - 1, 1)
        experts = end.experts[wanted.experts_from * row_bytes :]
        meta["routed_experts"] = base64.b64encode(experts).decode("ascii")
    meta["dp_rank"] = None
    meta["e2e_latency"] = time.monotonic() - request.arrived
    meta["response_sent_to_client_ts"] = time.time()
    body: dict[str, Any] = {
        "text": _text(wanted, end, codec),
        "output_ids": end.output_ids,
        "meta_info": meta,
    }
    if wanted.prompt_ids:
        body["prompt_token_ids"] = request.input_ids
    return body


def _text(wanted: Wanted, end: Finished, codec: TextCodec) -> str:
    """The response's text, without what stopped it."""
    matched = end.finish_reason.get("matched")
    ids = end.output_ids
    if wanted.trim_stop and isinstance(matched, int):
        ids = ids[:-1]
    text = codec.decode(ids, wanted.skip_special)
    if wanted.trim_stop and isinstance(matched, str) and matched in text:
        text = text[: text.index(matched)]
    return text
