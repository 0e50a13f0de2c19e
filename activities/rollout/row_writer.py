"""Rows for observers' files, written in order behind the producer's back.

    put() -> queue (bounded, never waits) -> task -> append_rows

An observation is worth a little memory and nothing else: rows that meet a full queue or a storage
error are counted, logged and forgotten. In a bucket each call is an object: there rows are gathered
for ``GATHER_S`` seconds, or until the queue is half full, and those of one file written together.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog

from activities.storage.store import Store
from models.errors import PerdureError

MAX_QUEUED_ROWS = 512
"""Minutes of a storage that hangs, in well below a megabyte."""
CLOSE_S = 10.0
GATHER_S = 10.0
"""What a kill may lose of a run whose root is a bucket, and by how much ``status`` may be late."""

_log = structlog.get_logger(__name__)


class RowWriter:
    """Appends rows to JSONL files of one root; belongs to one event loop. Never raises."""

    def __init__(self, store: Store, max_queued_rows: int = MAX_QUEUED_ROWS) -> None:
        self._store = store
        self._queue: asyncio.Queue[tuple[str, Mapping[str, Any]] | None] = asyncio.Queue(
            max_queued_rows
        )  # None only wakes the task
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._closing = False
        self._lost = 0

    @property
    def lost(self) -> int:
        """Rows that were dropped or could not be written."""
        return self._lost

    def put(self, rel: str, row: Mapping[str, Any]) -> None:
        """Hand over a row of the file ``rel``. Returns at once."""
        if self._task is None and not self._closing:
            self._task = asyncio.ensure_future(self._run())
        try:
            if self._closing:
                raise asyncio.QueueFull
            self._queue.put_nowait((rel, row))
            if 2 * self._queue.qsize() >= self._queue.maxsize:
                self._hurry.set()
        except asyncio.QueueFull:
            self._lose(rel, "the queue is full or closed")

    async def aclose(self, timeout_s: float = CLOSE_S) -> None:
        """Write what was handed over, for at most ``timeout_s`` seconds."""
        self._closing = True
        self._hurry.set()
        if self._task is None:
            return
        with suppress(asyncio.QueueFull):
            self._queue.put_nowait(None)
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            self._task.cancel()
            _log.warning("observations_not_flushed", rows=self._queue.qsize())

    async def _run(self) -> None:
        while not (self._closing and self._queue.empty()):
            entries = [await self._queue.get()]
            if not self._store.is_local:
                entries += await self._gathered()
            files: dict[str, list[Mapping[str, Any]]] = {}
            for rel, row in filter(None, entries):
                files.setdefault(rel, []).append(row)
            for rel, rows in files.items():
                await self._write(rel, rows)

    async def _gathered(self) -> list[tuple[str, Mapping[str, Any]] | None]:
        """What came meanwhile; at the end of the writer's life it is taken as it is."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), GATHER_S)
        if not self._closing:
            self._hurry.clear()
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    async def _write(self, rel: str, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            await asyncio.to_thread(self._store.append_rows, rel, rows)
        except (OSError, PerdureError) as error:
            self._lose(rel, str(error), len(rows))

    def _lose(self, rel: str, reason: str, num_rows: int = 1) -> None:
        before, self._lost = self._lost, self._lost + num_rows
        if before.bit_length() < self._lost.bit_length():  # at 1, 2, 4, 8 ...: it may repeat
            _log.warning("observation_not_written", file=rel, reason=reason, lost=self._lost)
