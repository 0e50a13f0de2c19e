"""A service that runs programs against tests, over HTTP: what is sent again, what answers mean.

``POST {program, tests, max_execution_time}`` to ``/test_program`` (tests are statements) or
``/test_program_stdio`` (tests are ``{input, output}``); the answer holds ``results``, a boolean or
a number from 0 to 1 for each test. A program may be run twice: running it changes nothing, so a
lost answer is asked for again.
"""

import asyncio
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, NamedTuple

import httpx

from activities.wire.faults import LOGGED_BODY_CHARS

_RETRIED = frozenset((502, 503, 504))
_RETRIED_ON_REQUEST = frozenset((413, 429))
"""Sent again only when the answer says when (``Retry-After``)."""
_MAX_RETRY_AFTER_S = 30.0
"""Longest wait that a service can ask for."""
_TIMEOUT_RANGE_S = (30.0, 300.0)
_TIMEOUT_FACTOR = 10.0
"""A request may take so many times the program's own limit: it may wait in the service's queue."""


class RetryPolicy(NamedTuple):
    """How often a request is sent again, and how long after."""

    budget: int = 3
    """Attempts after the first."""
    backoff_factor: float = 1.0
    """Seconds before the first of them; doubled for each further one."""

    def pause_s(self, retry: int) -> float:
        """Seconds before the ``retry``-th repetition, from 1."""
        return self.backoff_factor * float(2 ** (retry - 1))


class ServiceStatus(StrEnum):
    """What became of a request."""

    OK = "ok"
    REJECTED = "rejected"
    """The service will not run this program (4xx, or 500 when it broke it): its score is 0."""
    ERROR = "service_error"
    """The service failed; nothing is known about the program."""


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """The answer to one program."""

    status: ServiceStatus
    attempts: int
    results: tuple[float, ...] = ()
    """One number from 0 to 1 a test."""
    http_status: int | None = None
    detail: str = ""

    @property
    def pass_rate(self) -> float:
        """Mean of the results; 0 without any."""
        return math.fsum(self.results) / len(self.results) if self.results else 0.0


class CodeService:
    """The connections to one service.

    ``url`` has no path of its own. ``transport`` is a seam for tests.
    """

    def __init__(
        self,
        url: str,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008  a tuple
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.policy = policy
        self._http = httpx.AsyncClient(
            base_url=self.url,
            transport=transport,
            timeout=None,  # every call brings its own deadline
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close the pooled connections."""
        await self._http.aclose()

    async def run(self, path: str, body: dict[str, Any], max_execution_s: float) -> ServiceAnswer:
        """Have a program run; every failure is in the answer.

        Args:
            path: ``/test_program`` or ``/test_program_stdio``.
            body: ``program`` and ``tests``.
            max_execution_s: limit of one test.
        """
        timeout_s = request_timeout_s(max_execution_s)
        asked = {**body, "max_execution_time": max_execution_s}
        attempt = 0
        while True:
            attempt += 1
            answer, wait_s = await self._ask(path, asked, timeout_s, attempt)
            if wait_s is None:
                return answer
            await asyncio.sleep(wait_s)

    async def _ask(
        self, path: str, body: dict[str, Any], timeout_s: float, attempt: int
    ) -> tuple[ServiceAnswer, float | None]:
        """One attempt, and the pause before the next; None when there is none."""
        pause_s = self.policy.pause_s(attempt) if attempt <= self.policy.budget else None
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.post(path, json=body)
        except (TimeoutError, httpx.TransportError) as error:
            reason = str(error) or f"no answer within {timeout_s:g} s"
            detail = f"{self.url}{path}: {reason}"
            return ServiceAnswer(ServiceStatus.ERROR, attempt, detail=detail), pause_s
        asked_s = _retry_after_s(response)
        if response.status_code in _RETRIED:
            waits = pause_s if pause_s is None or asked_s is None else asked_s
            return self._failed(response, attempt), waits
        if response.status_code in _RETRIED_ON_REQUEST and asked_s is not None:
            return self._failed(response, attempt), None if pause_s is None else asked_s
        return self._final(response, attempt), None

    def _final(self, response: httpx.Response, attempt: int) -> ServiceAnswer:
        code = response.status_code
        if code == 500 or (400 <= code < 500 and code != 429):
            return ServiceAnswer(
                ServiceStatus.REJECTED, attempt, http_status=code, detail=_excerpt(response)
            )
        results = _results(response) if code == 200 else None
        if results is None:
            return self._failed(response, attempt)
        return ServiceAnswer(ServiceStatus.OK, attempt, results, code)

    def _failed(self, response: httpx.Response, attempt: int) -> ServiceAnswer:
        return ServiceAnswer(
            ServiceStatus.ERROR,
            attempt,
            http_status=response.status_code,
            detail=f"{self.url} answered {response.status_code}: {_excerpt(response)}",
        )


def request_timeout_s(max_execution_s: float) -> float:
    """Seconds that one attempt may take, for a program whose tests may take ``max_execution_s``."""
    low, high = _TIMEOUT_RANGE_S
    return min(max(_TIMEOUT_FACTOR * max_execution_s, low), high)


def _results(response: httpx.Response) -> tuple[float, ...] | None:
    """One number a test; None when the answer is no such list."""
    try:
        answer = response.json()
    except ValueError:
        return None
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        return None
    if not all(isinstance(each, (bool, int, float)) and 0 <= each <= 1 for each in results):
        return None
    return tuple(float(each) for each in results)


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds that the answer asks to wait, at most ``_MAX_RETRY_AFTER_S``; None: it asks nothing.

    Both forms of the header: seconds, and a date.
    """
    text = response.headers.get("retry-after", "").strip()
    if text.isdecimal():
        return min(float(text), _MAX_RETRY_AFTER_S)
    try:
        due = parsedate_to_datetime(text)
    except ValueError:
        return None
    if due.tzinfo is None:
        due = due.replace(tzinfo=UTC)
    return min(max((due - datetime.now(UTC)).total_seconds(), 0.0), _MAX_RETRY_AFTER_S)


def _excerpt(response: httpx.Response) -> str:
    return response.text[:LOGGED_BODY_CHARS]
