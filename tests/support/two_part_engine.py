"""An engine server of two processes: one answers HTTP, the other turns tokens into answers.

Run as a program it prints ``{"url", "detokenizer"}`` (an address and a process id) and serves until
it is killed. Once the second process is gone, every call but ``/generate`` and ``/health`` is
answered as before: ``/generate`` hangs, and ``/health`` says 503 in the end.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.loopback import Asked, LoopbackServer, http_answer, read_request

HEALTH_S = 20.0
"""So long such a server waits for its other process before it calls itself unhealthy."""
READY_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


class TwoPartServer(LoopbackServer):
    """Serves policy ``version``; each request's id goes through the other process, ``cat``."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._other: asyncio.subprocess.Process | None = None

    async def start(self) -> int:
        """Listen; the process id of the other part."""
        self._other = await asyncio.create_subprocess_exec(
            "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        await self.listen()
        return self._other.pid

    async def receive(self) -> None:
        """Hand out what the other process sends; it says nothing when there is no more."""
        assert self._other is not None
        assert self._other.stdout is not None
        while line := await self._other.stdout.readline():
            waiting = self._waiting.pop(line.decode().strip(), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        await asyncio.Event().wait()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked = await read_request(reader)
            status, body = await self._answer(asked)
            writer.write(http_answer(status, json.dumps(body).encode()))

    async def _answer(self, asked: Asked) -> tuple[int, Any]:
        if asked.path == "/generate":
            body = json.loads(asked.body)
            await self._through(body["rid"])
            return 200, self._tokens(body)
        if asked.path == "/health":
            try:
                await asyncio.wait_for(self._through("HEALTH_CHECK"), HEALTH_S)
            except TimeoutError:
                return 503, None
            return 200, None
        return 200, {"weight_version": str(self.version), "success": True}

    async def _through(self, rid: str) -> None:
        assert self._other is not None
        assert self._other.stdin is not None
        self._waiting[rid] = asyncio.get_running_loop().create_future()
        self._other.stdin.write(rid.encode() + b"\n")
        await self._waiting[rid]

    def _tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = [7] * body["sampling_params"]["max_new_tokens"]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "length", "length": len(ids)},
            "weight_version": str(self.version),
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return {"text": "", "output_ids": ids, "meta_info": meta}


@dataclass(frozen=True)
class TwoPartEngine:
    """A running one."""

    url: str
    detokenizer: int
    """Process id."""


@asynccontextmanager
async def two_part_engine(version: int = 0) -> AsyncIterator[TwoPartEngine]:
    """A server of this kind as a process of its own; it ends with the context."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.two_part_engine", str(version)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), READY_S)
        yield TwoPartEngine(**json.loads(line))
    finally:
        process.kill()
        await process.wait()


async def _main(version: int) -> None:
    server = TwoPartServer(version)
    other = await server.start()
    sys.stdout.write(json.dumps({"url": server.url, "detokenizer": other}) + "\n")
    sys.stdout.flush()
    await server.receive()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
