"""The fault taxonomy, row by row."""

import json

import httpx
import pytest

from activities.wire.faults import classify_error, classify_status

URL = "http://engine:30000"


def status(code, body, method="POST", path="/generate"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return classify_status(method, path, code, data)


@pytest.mark.parametrize(
    ("code", "body", "category"),
    [
        (429, b"", "overload"),
        (429, b"anything", "overload"),
        (503, {"detail": "Rollout worker unavailable"}, "transport"),
        (503, {"detail": "No healthy rollout workers available"}, "unavailable"),
        (503, {"message": "The request queue is full."}, "overload"),
        (503, {"message": "The request is aborted by a higher priority request."}, "overload"),
        (503, {"message": "Request waiting timeout reached."}, "timeout"),
        (503, {"message": "Request running timeout reached.", "object": "error"}, "timeout"),
        # detail wins over message
        (503, {"detail": "Rollout worker unavailable", "message": "x"}, "transport"),
        (503, {"detail": "x", "message": "The request queue is full."}, None),
        (503, {"detail": None, "message": "The request queue is full."}, None),
        # exact match only
        (503, {"message": "The request queue is full"}, None),
        (503, {"message": "the request queue is full."}, None),
        (503, {"detail": "No healthy workers"}, None),
        (503, {"message": "Using priority is disabled for this server."}, None),
        # not a JSON object with a text
        (503, ["The request queue is full."], None),
        (503, {"message": {"text": "The request queue is full."}}, None),
        (503, {"error": {"message": "The request queue is full."}}, None),
        (503, b"The request queue is full.", None),
        (503, b"", None),
        (503, b"\xff\xfe{", None),
        # other statuses
        (500, {"detail": "Rollout worker unavailable"}, None),
        (400, {"message": "The request queue is full."}, None),
        (499, {"error": {"message": "Request gated was aborted"}}, None),
        (502, b"", None),
    ],
)
def test_status(code, body, category):
    assert status(code, body) == category


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/generate"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/update_weights"),
        ("POST", "/reward"),
        ("POST", "/generate/"),
        ("POST", "/v1/generate"),
    ],
)
@pytest.mark.parametrize(
    ("code", "body"), [(429, {}), (503, {"detail": "Rollout worker unavailable"})]
)
def test_only_post_generate_can_fault(method, path, code, body):
    assert status(code, body, method, path) is None


def http_error(code, body, method="POST", path="/generate"):
    request = httpx.Request(method, URL + path)
    response = httpx.Response(code, json=body, request=request)
    return httpx.HTTPStatusError("no", request=request, response=response)


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (httpx.ConnectTimeout("slow"), "timeout"),
        (httpx.ReadTimeout("slow"), "timeout"),
        (httpx.WriteTimeout("slow"), "timeout"),
        (httpx.PoolTimeout("slow"), "timeout"),
        (httpx.ConnectError("refused"), "transport"),
        (httpx.ReadError("reset"), "transport"),
        (httpx.WriteError("reset"), "transport"),
        (httpx.CloseError("reset"), "transport"),
        (httpx.RemoteProtocolError("no response"), "transport"),
        (http_error(503, {"message": "The request queue is full."}), "overload"),
        (http_error(429, {}), "overload"),
        (http_error(500, {}), None),
        (http_error(503, {"detail": "Rollout worker unavailable"}, path="/reward"), None),
        (http_error(429, {}, method="GET"), None),
        (TimeoutError("a reward service"), None),
        (ConnectionError("not ours"), None),
        (httpx.DecodingError("not gzip"), None),
        (ValueError("a defect"), None),
    ],
)
def test_errors(error, category):
    assert classify_error(error) == category
