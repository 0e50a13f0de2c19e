"""Requests to a live engine as they are, for a diagnosis: nothing is checked before it is sent.

What ends a server must not be sent with it; ``EngineClient`` is for everything else.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from activities.wire.token import bearer
from models.errors import ServiceUnreachable


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int
    text: str

    def json(self) -> Any:
        """The body as JSON; None when it is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None


class EngineProbe:
    """Asks one server. A connection is used once: some servers close it after an error."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
        token: str | None = None,
    ) -> None:
        """``timeout_s``: for every request, its whole answer included; ``token``: if it asks."""
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            # One that gives an answer in parts: an abort is tried while it is still coming.
            transport=transport or httpx.AsyncHTTPTransport(),
            timeout=None,  # every call brings its own deadline
            trust_env=False,
            headers={"connection": "close", **bearer(token)},
        )

    async def get(self, path: str) -> Reply:
        """``GET path``. Raises ServiceUnreachable without an answer in time."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: Any) -> Reply:
        """``POST path`` with ``body`` as JSON. Raises ServiceUnreachable as ``get``."""
        return await self._ask("POST", path, json.dumps(body))

    async def post_text(self, path: str, content: str) -> Reply:
        """``POST path`` with ``content``, said to be JSON. Raises ServiceUnreachable as ``get``."""
        return await self._ask("POST", path, content)

    async def post_stream(
        self, path: str, body: Any, meanwhile: Callable[[], Awaitable[None]]
    ) -> Reply:
        """``POST path``; ``meanwhile`` runs once the first part of the answer is there.

        Raises ServiceUnreachable as ``get``, and what ``meanwhile`` raises.
        """
        asked = self._http.stream("POST", path, json=body)
        try:
            async with asyncio.timeout(self._timeout_s), asked as answer:
                parts = answer.aiter_text()
                text = await anext(parts, "")
                await meanwhile()
                text += "".join([part async for part in parts])
        except (TimeoutError, httpx.TransportError) as error:
            raise self._unreachable("POST", path, error) from error
        return Reply(answer.status_code, text)

    async def aclose(self) -> None:
        """Close open connections."""
        await self._http.aclose()

    async def _ask(self, method: str, path: str, content: str | None) -> Reply:
        headers = {} if content is None else {"content-type": "application/json"}
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._http.request(method, path, content=content, headers=headers)
        except (TimeoutError, httpx.TransportError) as error:
            raise self._unreachable(method, path, error) from error
        return Reply(answer.status_code, answer.text)

    def _unreachable(self, method: str, path: str, error: Exception) -> ServiceUnreachable:
        reason = str(error) or type(error).__name__
        return ServiceUnreachable(
            f"{self.url}: {method} {path} had no answer within {self._timeout_s:g} s: {reason}"
        )
