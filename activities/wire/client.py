"""The HTTP client of one engine. One call is one request: nothing is retried here.

A lost answer may have been computed, so a retry at this level would sample twice. Known serving
faults become ``GenerationFault`` and the caller requeues the whole prompt group.
"""

import asyncio

import httpx
import orjson
from pydantic import ValidationError

from activities.wire.answer_checks import answer_problem
from activities.wire.connection import excerpt
from activities.wire.contract import GENERATE, GenerateRequest, GenerateResponse
from activities.wire.control import EngineControls
from activities.wire.faults import TIMEOUT, classify_error, was_gated
from activities.wire.request_checks import request_problem
from activities.wire.router_contract import GROUP_HEADER, GroupTag
from models.errors import ContractViolation, GenerationFault, RequestGated

REQUEST_ID_HEADER = "x-perdure-request-id"


class EngineClient(EngineControls):
    """Speaks the engine contract to one server. Every call has a deadline.

    Whoever generates gives ``vocab_size`` (of the model's config, not of its tokenizer) and
    ``context_length`` (tokens): one token id outside the vocabulary ends an SGLang server with all
    its live requests, so nothing is sent unchecked.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int | None = None,
        context_length: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__(url, transport, token)
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._generate_url = httpx.URL(self.url + GENERATE)
        self._host = self._generate_url.netloc.decode()

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
        vocab_size = self._checked(request)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._post(request, group)
        except TimeoutError as error:
            raise GenerationFault(
                f"{self.url}: request {request.rid} had no answer after {timeout_s:g} s", TIMEOUT
            ) from error
        except (httpx.RequestError, httpx.HTTPStatusError) as error:
            raise self._failure(request.rid, error) from error
        return self._check_answer(request, answer.content, vocab_size)

    async def _post(self, request: GenerateRequest, group: GroupTag | None) -> httpx.Response:
        """The answer to one call, read wholly; ``HTTPStatusError`` unless its status is good.

        Straight to the transport: what an ``AsyncClient`` adds (redirects, cookies, authentication
        in turns, URLs that are merged) no engine asks for, and it costs more than all the rest.
        """
        body = request.model_dump_json(exclude_none=True).encode()
        headers = {
            "host": self._host,
            **self._authorization,
            "content-type": "application/json",
            "content-length": str(len(body)),
            REQUEST_ID_HEADER: request.rid,
        }
        if group is not None:
            headers[GROUP_HEADER] = group.header()
        # A stream, so that httpx does not look for the headers that are there already.
        call = httpx.Request(
            "POST", self._generate_url, headers=headers, stream=httpx.ByteStream(body)
        )
        answer = await self._transport.handle_async_request(call)
        answer.request = call
        await answer.aread()
        return answer.raise_for_status()

    def _checked(self, request: GenerateRequest) -> int:
        """Refuse what must not be sent; the size of the vocabulary that the answer keeps to."""
        if self._vocab_size is None or self._context_length is None:
            raise ContractViolation(
                f"request {request.rid} to {self.url}: this client was told no vocabulary size or "
                "context length, so it generates nothing"
            )
        problem = request_problem(request, self._vocab_size, self._context_length)
        if problem is not None:
            raise ContractViolation(f"request {request.rid}: {problem}")
        return self._vocab_size

    def _check_answer(
        self, request: GenerateRequest, content: bytes, vocab_size: int
    ) -> GenerateResponse:
        try:
            answer = _read_answer(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "body"
            raise ContractViolation(
                f"{self.url}: answer to {request.rid}: {field}: {first['msg']}"
            ) from error
        problem = answer_problem(request, answer, vocab_size)
        if problem is not None:
            raise ContractViolation(f"{self.url}: answer to {request.rid}: {problem}")
        return answer

    def _failure(self, rid: str, error: httpx.RequestError | httpx.HTTPStatusError) -> Exception:
        detail = str(error) or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError):
            detail = f"status {error.response.status_code}: {excerpt(error.response)}"
        category = classify_error(error)
        message = f"{self.url}: request {rid}: {type(error).__name__}: {detail}"
        if was_gated(error, rid):
            return RequestGated(message)
        if category is None:
            return ContractViolation(f"{message} (not a known serving fault)")
        return GenerationFault(message, category)


def _read_answer(content: bytes) -> GenerateResponse:
    """The answer in ``content``; pydantic's own reading of JSON takes half as long again."""
    try:
        fields = orjson.loads(content)
    except orjson.JSONDecodeError:
        # It takes NaN, which is found and named later, and says what is wrong with the rest.
        return GenerateResponse.model_validate_json(content)
    return GenerateResponse.model_validate(fields)
