"""Which failures of a generation call are known serving faults, recognized exactly.

A known fault requeues the whole prompt group; everything else is fatal, because a misconfigured
server or a defect would otherwise be retried for ever. Only ``POST /generate`` can fault: an
HTTP error of a reward service or of a control call is never a serving failure.
"""

import json
from typing import Any

import httpx

from activities.wire.contract import (
    GENERATE,
    NO_HEALTHY_WORKERS,
    PRIORITY_EVICTED,
    QUEUE_FULL,
    REQUEST_GATED,
    RUNNING_TIMEOUT,
    WAITING_TIMEOUT,
    WORKER_UNAVAILABLE,
)

TRANSPORT = "transport"
OVERLOAD = "overload"
UNAVAILABLE = "unavailable"
TIMEOUT = "timeout"
CATEGORIES = (TRANSPORT, OVERLOAD, UNAVAILABLE, TIMEOUT)

LOGGED_BODY_CHARS = 512
GATED_STATUS = 499

_UNAVAILABLE_MESSAGES = {
    WORKER_UNAVAILABLE: TRANSPORT,
    NO_HEALTHY_WORKERS: UNAVAILABLE,
    QUEUE_FULL: OVERLOAD,
    PRIORITY_EVICTED: OVERLOAD,
    WAITING_TIMEOUT: TIMEOUT,
    RUNNING_TIMEOUT: TIMEOUT,
}


def classify_status(method: str, path: str, status: int, body: bytes) -> str | None:
    """Category of an HTTP error answer, or None when it is fatal.

    Args:
        method: Method of the request, upper case.
        path: Path of the request's URL, exactly as sent.
        status: Status code of the answer.
        body: Raw body of the answer.
    """
    if method != "POST" or path != GENERATE:
        return None
    if status == 429:
        return OVERLOAD
    if status != 503:
        return None
    return _UNAVAILABLE_MESSAGES.get(_message(body) or "")


def classify_error(error: Exception) -> str | None:
    """Category of a failed generation call, or None when it is fatal.

    Timeouts are subclasses of transport errors in httpx, hence the order. The built-in
    ``TimeoutError`` is not a serving fault: a reward service may have raised it.
    """
    if isinstance(error, httpx.TimeoutException):
        return TIMEOUT
    if isinstance(error, httpx.TransportError):
        return TRANSPORT
    if isinstance(error, httpx.HTTPStatusError):
        request, response = error.request, error.response
        return classify_status(
            request.method, request.url.path, response.status_code, response.content
        )
    return None


def was_gated(error: Exception, rid: str) -> bool:
    """Whether a paused engine aborted the request ``rid`` at its gate.

    No token of it was made, and during a publication it may be sent again.
    """
    if not isinstance(error, httpx.HTTPStatusError) or error.response.status_code != GATED_STATUS:
        return False
    answer = _json_object(error.response.content)
    detail = answer.get("error")
    return isinstance(detail, dict) and detail.get("message") == REQUEST_GATED.format(rid=rid)


def _json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; empty when it is none."""
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _message(body: bytes) -> str | None:
    """The text of ``detail`` if present, else of ``message``; None unless it is a string."""
    answer = _json_object(body)
    message = answer["detail"] if "detail" in answer else answer.get("message")
    return message if isinstance(message, str) else None
