"""Worker processes that answer one JSON line with one JSON line, each within a time budget.

A process that hangs can only be ended by killing it: a thread cannot, and ``signal.alarm`` works
in the main thread alone. A killed worker is replaced by the next call, so the pool keeps its size.
"""

import asyncio
import json
from typing import Any

_ANSWER_LIMIT_BYTES = 1 << 20


class WorkerFailed(Exception):
    """A worker died or ran past its budget; the message says which."""


class ProcessPool:
    """At most ``num_workers`` processes of ``command``, started when needed.

    A worker first writes one line when it is ready (within ``start_s`` seconds), then one line for
    each line it reads (within ``budget_s`` seconds).
    """

    def __init__(
        self, command: tuple[str, ...], num_workers: int, budget_s: float, start_s: float
    ) -> None:
        self._command = command
        self._budget_s = budget_s
        self._start_s = start_s
        self._permits = asyncio.Semaphore(num_workers)
        self._idle: list[asyncio.subprocess.Process] = []
        self._live: set[asyncio.subprocess.Process] = set()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return sorted(process.pid for process in self._live)

    async def call(self, task: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer to ``task``. Raises ``WorkerFailed``."""
        line = json.dumps(task).encode() + b"\n"
        async with self._permits:
            process = self._idle_worker() or await self._start()
            answer = None
            try:
                answer = await self._exchange(process, line, self._budget_s)
            finally:
                if answer is None:  # failed or cancelled in the middle: its state is unknown
                    await self._kill(process)
                else:
                    self._idle.append(process)
            return answer

    async def aclose(self) -> None:
        """Kill every worker."""
        self._idle.clear()
        for process in tuple(self._live):
            await self._kill(process)

    def _idle_worker(self) -> asyncio.subprocess.Process | None:
        """A live idle worker; one that was killed while idle must not cost an answer its score."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._live.discard(process)
        return None

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_ANSWER_LIMIT_BYTES,
        )
        self._live.add(process)
        ready = False
        try:
            await self._exchange(process, b"", self._start_s)
            ready = True
        finally:
            if not ready:
                await self._kill(process)
        return process

    async def _exchange(
        self, process: asyncio.subprocess.Process, line: bytes, budget_s: float
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(budget_s):
                process.stdin.write(line)
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError as error:
            raise WorkerFailed(
                f"no verdict within {budget_s:g} s; the worker was killed"
            ) from error
        except (OSError, ValueError) as error:
            raise WorkerFailed(f"the worker's pipe broke: {error}") from error
        if not answer:
            raise WorkerFailed("the worker died")
        try:
            parsed = json.loads(answer)
        except ValueError as error:
            raise WorkerFailed(f"the worker answered {answer[:80]!r}") from error
        if not isinstance(parsed, dict):
            raise WorkerFailed(f"the worker answered {answer[:80]!r}")
        return parsed

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._live.discard(process)
        if process.returncode is None:
            process.kill()
            await process.wait()
