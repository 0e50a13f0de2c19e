"""The engine actor: starts an engine server as its child process and watches it."""

import asyncio
import sys
from pathlib import Path

from activities.site import spec_of, store_of
from activities.storage import layout
from configs.run import RunSpec
from models.errors import EngineLost
from workers.actors.order import (
    ActorFacts,
    ActorOrder,
    describe,
    engine_threads,
    environment,
    inherited,
    num_cores,
)
from workers.engines.process import ServerCommand, ServerExit, ServerProcess

LOGS = "logs"
"""Folder of server logs under a local output root."""


class EngineActor:
    """Asyncio actor. The server dies with it; it survives its server to say how that ended."""

    def __init__(self, order: ActorOrder) -> None:
        self._order = order
        self._spec = spec_of(order.run)
        self._server: ServerProcess | None = None
        self._starting: asyncio.Task[ServerProcess] | None = None

    async def start(self) -> ActorFacts:
        """Start the server and return when it serves the prepared model. A repeated call joins.

        Raises:
            ConfigurationError: it refuses the model or its options.
            EngineLost: it ended or was not ready in time; the message holds its last log lines.
        """
        if self._starting is None:
            command = server_command(self._order, self._spec)
            timeout_s = self._spec.inference.start_timeout_s
            self._starting = asyncio.create_task(ServerProcess.start(command, timeout_s))
        self._server = await asyncio.shield(self._starting)
        return await self.facts()

    async def wait_exit(self) -> ServerExit:
        """Return when the server has ended."""
        if self._server is None:
            raise EngineLost(f"{self._order.name} of {self._order.run.run_id} was never started")
        return await self._server.wait_exit()

    async def stop(self, grace_s: float) -> None:
        """End the server; a clean end gets ``grace_s`` seconds."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def facts(self) -> ActorFacts:
        """Who this is; the process shown is the server's."""
        server = self._server
        if server is None:
            return describe(self._order)
        return describe(self._order, pid=server.pid, serving=server.alive, url=server.url)


def server_command(order: ActorOrder, spec: RunSpec) -> ServerCommand:
    """Command line and environment of the engine back end that ``spec`` names."""
    threads = engine_threads(spec, num_cores())
    store = store_of(order.run)
    ready_file = Path(order.scratch) / f"{order.name}.{order.incarnation}.ready.json"
    logs = store.local_path(LOGS) if store.is_local else Path(order.scratch)
    inference = spec.inference
    argv = [
        *(sys.executable, "-m", f"workers.engines.{inference.engine}"),
        *("--model-path", str(store.local_path(layout.PREPARED_MODEL))),
        *("--host", "127.0.0.1", "--port", "0", "--ready-file", str(ready_file)),
        *("--dtype", inference.dtype, "--num-threads", str(threads)),
        *("--max-running-requests", str(inference.max_running_requests)),
        *("--max-queued-requests", str(inference.max_queued_requests)),
        *("--kv-budget-mib", str(inference.kv_cache_mib)),
        *("--context-length", str(spec.core.max_context_length)),
    ]
    if inference.deterministic:
        argv.append("--deterministic")
    return ServerCommand(
        name=order.name,
        argv=tuple(argv),
        env=inherited(environment(order, spec, threads)),
        log_path=logs / f"{order.name}.log",
        ready_file=ready_file,
    )
