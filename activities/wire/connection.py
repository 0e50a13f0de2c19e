"""One engine's HTTP connection: a control call has a deadline, and fails in two ways only."""

import asyncio
from typing import Any

import httpx

from activities.multiplier import scaled
from activities.slow_waits import http_operation, told_while_slow
from activities.wire.faults import LOGGED_BODY_CHARS
from activities.wire.lanes import LaneTransport
from activities.wire.token import bearer, engine_token
from models.errors import ContractViolation, ServiceUnreachable


class OwnLimit(float):
    """Seconds that a call takes by itself when its caller names none: the multiplier applies."""


class EngineConnection:
    """The pooled connections to one server. Nothing is sent twice."""

    def __init__(
        self,
        url: str,
        transport: httpx.AsyncBaseTransport | None = None,
        token: str | None = None,
    ) -> None:
        """``token``: what the server asks for; default: this process's own."""
        self.url = url.rstrip("/")
        self._transport = transport or LaneTransport()
        self._authorization = bearer(token or engine_token())
        self._http = httpx.AsyncClient(
            base_url=self.url,
            transport=self._transport,
            timeout=None,  # every call brings its own deadline
            trust_env=False,  # a proxy from the environment must not see engine traffic
            headers=self._authorization,
        )

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
                f"{self.url}: {method} {path} answered {excerpt(response)!r}, not a JSON object"
            )
        return answer

    async def _call(
        self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """One control call.

        Raises:
            ServiceUnreachable: no answer within ``timeout_s`` seconds.
            ContractViolation: the engine refused.
        """
        if isinstance(timeout_s, OwnLimit):
            timeout_s = scaled(timeout_s)
        try:
            with told_while_slow(http_operation(method, self.url, path), timeout_s):
                async with asyncio.timeout(timeout_s):
                    response = await self._http.request(method, path, json=body)
        except (TimeoutError, httpx.TransportError) as error:
            reason = str(error) or type(error).__name__
            raise ServiceUnreachable(
                f"{self.url}: {method} {path} had no answer within {timeout_s:g} s: {reason}"
            ) from error
        if response.status_code != 200:
            raise ContractViolation(
                f"{self.url}: {method} {path} answered {response.status_code}: {excerpt(response)}"
            )
        return response

    async def _answers(self, path: str, timeout_s: float) -> bool:
        """Whether ``GET path`` is answered 200 in time."""
        try:
            with told_while_slow(http_operation("GET", self.url, path), timeout_s):
                async with asyncio.timeout(timeout_s):
                    answer = await self._http.get(path)
        except (TimeoutError, httpx.TransportError):
            return False
        return answer.status_code == 200


def excerpt(response: httpx.Response) -> str:
    """The start of an answer's body, for messages."""
    return response.text[:LOGGED_BODY_CHARS]
