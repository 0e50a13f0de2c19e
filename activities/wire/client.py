"""The HTTP client of one engine. One call is one request: nothing is retried here.

A lost answer may have been computed, so a retry at this level would sample twice. Known serving
faults become ``GenerationFault`` and the caller requeues the whole prompt group.
"""

import asyncio
import math
from typing import Any

import httpx
from pydantic import ValidationError

from activities.wire.contract import (
    ABORT_REQUEST,
    CONTINUE_GENERATION,
    FLUSH_CACHE,
    GENERATE,
    HEALTH,
    MODEL_INFO,
    PAUSE_GENERATION,
    UPDATE_WEIGHTS_FROM_DISK,
    WEIGHTS_CHECKER,
    GenerateRequest,
    GenerateResponse,
    PauseMode,
    UpdateWeightsFromDisk,
)
from activities.wire.faults import LOGGED_BODY_CHARS, TIMEOUT, classify_error, was_gated
from activities.wire.lanes import LaneTransport
from activities.wire.router_contract import GROUP_HEADER, ROUTER_RELEASE, GroupTag, ReleaseOrder
from models.errors import ContractViolation, GenerationFault, RequestGated, ServiceUnreachable
from models.sample import FinishReason

REQUEST_ID_HEADER = "x-perdure-request-id"


class EngineClient:
    """Speaks the engine contract to one server. Every call has a deadline.

    ``vocab_size`` and ``context_length`` (tokens) are checked before sending when given: one token
    id outside the vocabulary ends an SGLang server with all its live requests.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int | None = None,
        context_length: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._http = httpx.AsyncClient(
            base_url=self.url,
            transport=transport or LaneTransport(),
            timeout=None,  # every call brings its own deadline
            trust_env=False,  # a proxy from the environment must not see engine traffic
        )

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float, group: GroupTag | None = None
    ) -> GenerateResponse:
        """Sample one response within ``timeout_s`` seconds, queueing included.

        ``group`` tells a router which calls belong together; an engine does not look at it.

        Raises:
            GenerationFault: a known serving fault; the group may be requeued.
            RequestGated: a paused engine was told to abort what waited at its gate.
            ContractViolation: the request or the answer breaks the contract, or the engine
                answered with an error that is not a known fault.
        """
        self._check_request(request)
        headers = {"content-type": "application/json", REQUEST_ID_HEADER: request.rid}
        if group is not None:
            headers[GROUP_HEADER] = group.header()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._http.post(
                    GENERATE,
                    content=request.model_dump_json(exclude_none=True),
                    headers=headers,
                )
                answer.raise_for_status()
        except TimeoutError as error:
            raise GenerationFault(
                f"{self.url}: request {request.rid} had no answer after {timeout_s:g} s", TIMEOUT
            ) from error
        except (httpx.RequestError, httpx.HTTPStatusError) as error:
            raise self._failure(request.rid, error) from error
        return self._check_answer(request, answer.content)

    async def health(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the engine answers 200 on ``/health`` in time."""
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._http.get(HEALTH)
        except (TimeoutError, httpx.TransportError):
            return False
        return answer.status_code == 200

    async def model_info(self, *, timeout_s: float = 10.0) -> dict[str, Any]:
        """``model_path``, ``weight_version`` and whatever else the engine tells of its model."""
        return await self._control("GET", MODEL_INFO, timeout_s)

    async def pause(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        """Stop decoding: end live requests (abort), requeue them (retract) or hold them."""
        await self._control("POST", PAUSE_GENERATION, timeout_s, {"mode": mode})

    async def resume(self, *, timeout_s: float = 60.0) -> None:
        """Decode again after ``pause``."""
        await self._control("POST", CONTINUE_GENERATION, timeout_s, {})

    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        """Drop cached prefixes; the engine waits for running requests within the deadline."""
        path = f"{FLUSH_CACHE}?timeout={timeout_s:g}"
        await self._call("POST", path, timeout_s, {})

    async def update_weights_from_disk(self, path: str, version: int, timeout_s: float) -> None:
        """Load the folder ``path`` and serve it as ``version``; raises when it is refused."""
        body = UpdateWeightsFromDisk(model_path=path, weight_version=str(version))
        answer = await self._control(
            "POST", UPDATE_WEIGHTS_FROM_DISK, timeout_s, body.model_dump(exclude_none=True)
        )
        if answer.get("success") is not True:
            raise ContractViolation(
                f"{self.url}: loading {path} as version {version} failed: {answer.get('message')}"
            )

    async def checksums(self, *, timeout_s: float = 120.0) -> dict[str, str]:
        """Name -> xxh3_64 hex of every live tensor, all ranks merged."""
        answer = await self._control("POST", WEIGHTS_CHECKER, timeout_s, {"action": "checksum"})
        if answer.get("success") is not True or not answer.get("ranks"):
            raise ContractViolation(
                f"{self.url}: no weight checksums: {answer.get('message', answer)}"
            )
        merged: dict[str, str] = {}
        for rank in answer["ranks"]:
            for name, checksum in rank["checksums"].items():
                if merged.setdefault(name, checksum) != checksum:
                    raise ContractViolation(f"{self.url}: ranks disagree on the bytes of {name}")
        return merged

    async def abort(self, rid: str, *, timeout_s: float = 10.0) -> None:
        """End one request; its tokens so far are answered to whoever waits for it."""
        await self._call("POST", ABORT_REQUEST, timeout_s, {"rid": rid})

    async def abort_all(self, *, timeout_s: float = 10.0) -> None:
        """End every request of the engine."""
        await self._call("POST", ABORT_REQUEST, timeout_s, {"abort_all": True})

    async def release_groups(self, groups: tuple[str, ...], *, timeout_s: float = 10.0) -> None:
        """Tell a router that these groups ended early: it reserves nothing for them any more."""
        body = ReleaseOrder(groups=groups).model_dump()
        await self._call("POST", ROUTER_RELEASE, timeout_s, body)

    async def aclose(self) -> None:
        """Close the pooled connections."""
        await self._http.aclose()

    async def _control(
        self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """``_call`` whose answer must be a JSON object."""
        response = await self._call(method, path, timeout_s, body)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ContractViolation(
                f"{self.url}: {method} {path} answered {_excerpt(response)!r}, not a JSON object"
            )
        return answer

    async def _call(
        self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """One control call; unreachable is retryable, a refusal is a contract violation."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.request(method, path, json=body)
        except (TimeoutError, httpx.TransportError) as error:
            reason = str(error) or type(error).__name__
            raise ServiceUnreachable(
                f"{self.url}: {method} {path} had no answer within {timeout_s:g} s: {reason}"
            ) from error
        if response.status_code != 200:
            raise ContractViolation(
                f"{self.url}: {method} {path} answered {response.status_code}: {_excerpt(response)}"
            )
        return response

    def _check_request(self, request: GenerateRequest) -> None:
        ids, limit = request.input_ids, self._vocab_size
        if not ids:
            raise ContractViolation(f"request {request.rid}: input_ids is empty")
        if min(ids) < 0 or (limit is not None and max(ids) >= limit):
            raise ContractViolation(
                f"request {request.rid}: input_ids holds a token outside [0, {limit}): "
                f"lowest {min(ids)}, highest {max(ids)}"
            )
        new_tokens = request.sampling_params.max_new_tokens
        if new_tokens < 1:
            raise ContractViolation(f"request {request.rid}: max_new_tokens is {new_tokens}")
        if self._context_length is not None and len(ids) + new_tokens > self._context_length:
            raise ContractViolation(
                f"request {request.rid}: {len(ids)} prompt tokens and max_new_tokens {new_tokens} "
                f"exceed the context of {self._context_length} tokens"
            )

    def _check_answer(self, request: GenerateRequest, content: bytes) -> GenerateResponse:
        try:
            answer = GenerateResponse.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "body"
            raise ContractViolation(
                f"{self.url}: answer to {request.rid}: {field}: {first['msg']}"
            ) from error
        problem = _answer_problem(request, answer, self._vocab_size)
        if problem:
            raise ContractViolation(f"{self.url}: answer to {request.rid}: {problem}")
        return answer

    def _failure(self, rid: str, error: httpx.RequestError | httpx.HTTPStatusError) -> Exception:
        detail = str(error) or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError):
            detail = f"status {error.response.status_code}: {_excerpt(error.response)}"
        category = classify_error(error)
        message = f"{self.url}: request {rid}: {type(error).__name__}: {detail}"
        if was_gated(error):
            return RequestGated(message)
        if category is None:
            return ContractViolation(f"{message} (not a known serving fault)")
        return GenerationFault(message, category)


def _excerpt(response: httpx.Response) -> str:
    return response.text[:LOGGED_BODY_CHARS]


def _answer_problem(
    request: GenerateRequest, answer: GenerateResponse, vocab_size: int | None
) -> str | None:
    """What the contract forbids in ``answer``, naming the field; None when nothing is wrong."""
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
    if not ids:
        return None  # aborted in the queue: an engine may leave out what it has nothing to say on
    return _tokens_problem(request, answer, vocab_size)


def _tokens_problem(
    request: GenerateRequest, answer: GenerateResponse, vocab_size: int | None
) -> str | None:
    """What is wrong with the tokens of an answer and their log-probs; None when nothing is."""
    meta, ids = answer.meta_info, answer.output_ids
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
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
