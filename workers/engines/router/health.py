"""Looks at every engine: does it answer, and does it serve the weights that it is registered with?

An engine that is being updated is paused, and SGLang answers 503 on ``/health`` after 20 s of a
pause. It is asked for ``/server_info`` then: whoever refuses the connection is gone. One that does
not answer in time may be loading weights, and whoever updates it has a deadline of his own.

A process that failed too often is never used again, because nobody knows its weights.
"""

import asyncio
import contextlib
import json
import logging

from activities.wire.contract import HEALTH, MODEL_INFO, SERVER_INFO
from models.errors import ContractViolation
from models.routing import EngineState
from workers.engines.router.options import RouterOptions
from workers.engines.router.table import Table
from workers.engines.router.target import Target
from workers.engines.router.upstream import Upstream, UpstreamLost

logger = logging.getLogger(__name__)


class HealthLoop:
    """Checks all engines of ``table`` at once, again and again."""

    def __init__(self, table: Table, options: RouterOptions) -> None:
        self._table = table
        self._options = options

    async def run(self) -> None:
        """Until cancelled. An engine that a table brings or moves is looked at without delay."""
        async with asyncio.TaskGroup() as checks:
            while True:
                changed, now = self._table.changed, _now()
                for target in self._table.targets:
                    if target.check_at <= now and not target.checking:
                        target.checking = True
                        target.check_at = now + self._options.health_interval_s
                        checks.create_task(self._check(target))
                self._table.groups.expire(now)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), self._next_s(now))

    def _next_s(self, now: float) -> float:
        """Seconds until the next check is due."""
        interval_s = self._options.health_interval_s
        due = (each.check_at for each in self._table.targets if not each.checking)
        return min(interval_s, max(0.0, min(due, default=now + interval_s) - now))

    async def _check(self, target: Target) -> None:
        """One look at one engine; an answer about what has changed meanwhile does not count."""
        try:
            if target.is_judged:
                await self._judge(target)
            elif target.state is EngineState.UPDATING:
                await self._look_in(target)
        finally:
            target.checking = False

    async def _judge(self, target: Target) -> None:
        asked_of, problem, version = target.engine, None, ""
        try:
            async with asyncio.timeout(self._options.health_timeout_s):
                version = await _served_version(target.upstream)
        except TimeoutError:
            problem = f"no answer within {self._options.health_timeout_s:g} s"
        except UpstreamLost as error:
            problem = str(error)
        except ContractViolation as error:
            problem = error.message
        target.upstream.drop_idle()
        if target.engine != asked_of or not target.is_judged:
            return
        if problem is not None:
            self._failed(target, problem)
        else:
            target.failed_checks = 0
            self._compare(target, version)

    async def _look_in(self, target: Target) -> None:
        """Whether an engine that is being updated still listens."""
        asked_of, problem = target.engine, None
        try:
            async with asyncio.timeout(self._options.health_timeout_s):
                await target.upstream.call(b"GET", SERVER_INFO.encode())
        except TimeoutError:
            return
        except UpstreamLost as error:
            problem = str(error)
        target.upstream.drop_idle()
        if target.engine != asked_of or target.state is not EngineState.UPDATING:
            return
        if problem is not None:
            self._failed(target, problem)
        else:
            target.failed_checks = 0

    def _failed(self, target: Target, problem: str) -> None:
        target.failed_checks += 1
        limit = self._options.health_failures
        if target.failed_checks < limit:
            logger.warning("%s fails a health check: %s", target.engine.name, problem)
        else:
            self._table.give_up(target, f"{limit} failed health checks, the last one: {problem}")

    def _compare(self, target: Target, version: str) -> None:
        wrong = version != str(target.engine.version)
        if wrong != target.wrong_weights:
            logger.warning(
                "%s serves version %s, registered is %d", target.engine.name, version,
                target.engine.version,
            )  # fmt: skip
            target.wrong_weights = wrong
            self._table.wake()


async def _served_version(upstream: Upstream) -> str:
    """The weight version that a healthy engine tells.

    Raises:
        UpstreamLost: it could not be asked.
        ContractViolation: it says that it is not healthy, or tells no version.
    """
    health = await upstream.call(b"GET", HEALTH.encode())
    if health.status != 200:
        raise ContractViolation(f"{HEALTH} answered {health.status}")
    info = await upstream.call(b"GET", MODEL_INFO.encode())
    try:
        version = json.loads(info.body)["weight_version"]
    except (ValueError, KeyError, TypeError):
        version = None
    if info.status != 200 or not isinstance(version, str):
        raise ContractViolation(f"{MODEL_INFO} answered {info.status} without a weight_version")
    return version


def _now() -> float:
    return asyncio.get_running_loop().time()
