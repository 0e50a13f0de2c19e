"""``POST /generate`` on the event loop: gate, model thread, answer; a lost client aborts."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from activities.wire.contract import WORKER_UNAVAILABLE
from workers.engines.native.answers import (
    PayloadError,
    Progress,
    ServerError,
    finished_body,
    json_response,
    progress_body,
)
from workers.engines.native.gate import Gate
from workers.engines.native.model_thread import ModelThread
from workers.engines.native.payload import Bounds, Job, parse_body, parse_generate
from workers.engines.native.request import Event, Finished, Refused, Request, Tokens

CLIENT_GONE = 499


class Generation:
    """All requests in flight, by id."""

    def __init__(self, bounds: Bounds, gate: Gate) -> None:
        self._bounds, self._gate = bounds, gate
        self._flights: dict[str, asyncio.Queue[Event]] = {}
        self.stopping = False

    @property
    def num_requests(self) -> int:
        """Requests that have not been answered yet, held ones included."""
        return len(self._flights)

    def knows(self, rid: str) -> bool:
        """Whether a request of exactly this id has not been answered yet."""
        return rid in self._flights

    def deliver(self, batch: list[tuple[Request, Event]]) -> None:
        """Events from the model thread; those of forgotten requests are dropped."""
        for request, event in batch:
            flight = self._flights.get(request.rid)
            if flight is not None:
                flight.put_nowait(event)

    def fail_all(self, error: Refused) -> None:
        """Answer every request with ``error``: the model thread is gone."""
        for flight in self._flights.values():
            flight.put_nowait(error)

    async def handle(self, http: HttpRequest, model: ModelThread) -> Response:
        """Answer one call."""
        try:
            if self.stopping or not model.loaded.done() or model.ended.done():
                raise ServerError(WORKER_UNAVAILABLE, 503)
            body = parse_body(await http.body())
            streamed = body.get("stream") is True
        except PayloadError as error:
            return error.response()
        try:
            job = parse_generate(body, self._bounds)
            self._register(job)
        except ServerError as error:
            return error.response()
        except PayloadError as error:
            return _stream_error(error) if streamed else error.response()
        if job.stream:
            return StreamingResponse(self._chunks(job, model), media_type="text/event-stream")
        return await self._answer(http, job, model)

    def _register(self, job: Job) -> None:
        for request in job.requests:
            if request.rid in self._flights:
                raise PayloadError(f"Duplicate request ID detected: {request.rid}")
        for request in job.requests:
            self._flights[request.rid] = asyncio.Queue()

    async def _answer(self, http: HttpRequest, job: Job, model: ModelThread) -> Response:
        work = asyncio.ensure_future(self._collect(job, model))
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=CLIENT_GONE)
            bodies = work.result()
        except PayloadError as error:
            return error.response()
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
        return json_response(bodies if job.as_list else bodies[0])

    async def _collect(self, job: Job, model: ModelThread) -> list[dict[str, Any]]:
        """The bodies of all samples, in the order asked for."""
        bodies = []
        async with aclosing(self._events(job, model)) as events:
            async for request, event in events:
                if isinstance(event, Finished):
                    bodies.append(finished_body(request, job.wanted, event, self._bounds.codec))
        return bodies

    async def _chunks(self, job: Job, model: ModelThread) -> AsyncIterator[bytes]:
        """Server-sent events: cumulative chunks, then ``[DONE]``."""
        so_far: dict[str, Progress] = {request.rid: Progress() for request in job.requests}
        try:
            async with aclosing(self._events(job, model)) as events:
                async for request, event in events:
                    yield _chunk(self._chunk_body(job, request, event, so_far[request.rid]))
        except PayloadError as error:
            yield _chunk(_stream_error_body(error))
        yield b"data: [DONE]\n\n"

    def _chunk_body(
        self, job: Job, request: Request, event: Finished | Tokens, so_far: Progress
    ) -> dict[str, Any]:
        codec = self._bounds.codec
        if isinstance(event, Finished):
            return finished_body(request, job.wanted, event, codec)
        so_far.output_ids += event.output_ids
        so_far.logprobs += event.logprobs
        return progress_body(request, job.wanted, so_far, event.weight_version, codec)

    async def _events(
        self, job: Job, model: ModelThread
    ) -> AsyncGenerator[tuple[Request, Finished | Tokens], None]:
        """Run a job's requests one after the other as far as the answer goes, all at once inside.

        Raises PayloadError for a refusal. What is unfinished when the caller stops is aborted.
        """
        entered, unfinished = 0, {request.rid for request in job.requests}
        try:
            for request in job.requests:
                await self._gate.enter(request.rid)
                entered += 1
                model.submit(request)
            for request in job.requests:
                flight = self._flights[request.rid]
                while request.rid in unfinished:
                    event = await flight.get()
                    if not isinstance(event, Tokens):
                        unfinished.discard(request.rid)
                    if isinstance(event, Refused):
                        raise ServerError(event.message, event.status)
                    yield request, event
        finally:
            for request in job.requests:
                del self._flights[request.rid]
                if request.rid in unfinished:
                    model.withdraw(request)
            for _ in range(entered):
                self._gate.leave()


async def _disconnected(http: HttpRequest) -> None:
    """Return when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _chunk(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _stream_error_body(error: PayloadError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status == 400 else "server_error"
    retryable = error.status == 503
    detail = {"message": error.message, "type": kind, "code": error.status, "retryable": retryable}
    return {"error": detail}


def _stream_error(error: PayloadError) -> Response:
    """SGLang has already answered 200 when it checks a streamed request."""
    content = _chunk(_stream_error_body(error)) + b"data: [DONE]\n\n"
    return Response(content, media_type="text/event-stream")
