"""Calls on their way: each gets an engine, waits for one, or is refused; every one is counted."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from activities.wire.contract import (
    NO_HEALTHY_WORKERS,
    QUEUE_FULL,
    WAITING_TIMEOUT,
    WORKER_UNAVAILABLE,
)
from activities.wire.router_contract import GroupTag
from models.routing import RouterState
from workers.engines.router.table import Table
from workers.engines.router.target import Group, Target
from workers.engines.router.upstream import Answer, UpstreamLost

TRANSPORT = "transport"
UNAVAILABLE = "unavailable"
FULL = "queue_full"
TIMEOUT = "waiting_timeout"

logger = logging.getLogger(__name__)


class Refusal(Exception):
    """No answer of an engine: the call is answered 503 with ``detail``; ``fault`` is its kind."""

    def __init__(self, detail: str, fault: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fault = fault


@dataclass(slots=True)
class _OpenCall:
    target: Target
    group: Group | None
    answered: bool = False


class Balancer:
    """Sends calls to the engines of ``table``.

    ``max_waiting`` calls may wait for an engine, each for ``queue_timeout_s`` seconds at most.
    """

    def __init__(self, table: Table, max_waiting: int, queue_timeout_s: float) -> None:
        self._table = table
        self._max_waiting = max_waiting
        self._queue_timeout_s = queue_timeout_s
        self.stopping = False
        self.num_waiting = 0
        self.num_active = 0
        self.faults = dict.fromkeys((TRANSPORT, UNAVAILABLE, FULL, TIMEOUT), 0)
        """Calls that were refused, by kind, since the start."""

    def state(self) -> RouterState:
        """What the router knows now."""
        return RouterState(
            engines=self._table.status(),
            active_calls=self.num_active,
            waiting_calls=self.num_waiting,
        )

    def stop(self) -> None:
        """Refuse what waits and what comes; open calls go on."""
        self.stopping = True
        self._table.wake()

    async def call(self, tag: GroupTag | None, path: bytes, body: bytes) -> Answer:
        """The answer of the engine that the call went to. It is sent once.

        A caller that is cancelled has hung up; so does the router, and its group ends.

        Raises:
            Refusal: there is no engine for it, or the connection to its engine was lost.
        """
        try:
            return await self._send(tag, path, body)
        except Refusal as refusal:
            self.faults[refusal.fault] += 1
            raise

    async def _send(self, tag: GroupTag | None, path: bytes, body: bytes) -> Answer:
        call = self._choose(tag) or await self._wait(tag)
        with self._open(call, tag):
            try:
                answer = await call.target.upstream.call(b"POST", path, body)
            except UpstreamLost as error:
                call.target.load.avoid(_now())
                logger.warning("%s: a call was lost: %s", call.target.engine.name, error)
                raise Refusal(WORKER_UNAVAILABLE, TRANSPORT) from error
            call.answered = answer.status == 200
            return answer

    def _choose(self, tag: GroupTag | None) -> _OpenCall | None:
        """An engine for a call; None when it must wait. A new group is given to the engine.

        Raises:
            Refusal: no waiting would help.
        """
        if self.stopping:
            raise Refusal(WORKER_UNAVAILABLE, TRANSPORT)
        table = self._table
        if tag is not None and (group := table.groups.get(tag)) is not None:
            if table.still_serves(group):
                return _OpenCall(group.target, group)
            table.groups.drop(group)
        target = table.least_active(_now())
        if target is not None:
            given = None if tag is None else table.groups.give(tag, target, _now())
            return _OpenCall(target, given)
        if table.is_set and not table.has_hope:
            raise Refusal(NO_HEALTHY_WORKERS, UNAVAILABLE)
        return None

    async def _wait(self, tag: GroupTag | None) -> _OpenCall:
        """An engine as soon as there is one.

        Raises:
            Refusal: too many calls wait, this one did for too long, or every engine was given up.
        """
        if self.num_waiting >= self._max_waiting:
            raise Refusal(QUEUE_FULL, FULL)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                while True:
                    await self._table.changed.wait()
                    if (call := self._choose(tag)) is not None:
                        return call
        except TimeoutError:
            if self._table.is_set:
                raise Refusal(WAITING_TIMEOUT, TIMEOUT) from None
            raise Refusal(NO_HEALTHY_WORKERS, UNAVAILABLE) from None
        finally:
            self.num_waiting -= 1

    @contextmanager
    def _open(self, call: _OpenCall, tag: GroupTag | None) -> Iterator[None]:
        """Count a call while it is open. One that is cancelled ends its group."""
        groups, target, group = self._table.groups, call.target, call.group
        self.num_active += 1
        target.active += 1
        if group is None or tag is None:
            target.load.reserved += 1
        else:
            groups.begin(group, tag, _now())
        target.changed()
        try:
            yield
        except asyncio.CancelledError:
            if group is not None:
                groups.drop(group)
            raise
        finally:
            self.num_active -= 1
            target.active -= 1
            if group is None:
                target.load.reserved -= 1
            else:
                groups.end(group, call.answered, _now())
            target.changed()


def _now() -> float:
    return asyncio.get_running_loop().time()
