"""An actor that owns one server process: starts it as its child and watches it."""

import asyncio
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from activities.site import spec_of, store_of
from configs.run import RunSpec
from models.errors import EngineLost
from workers.actors.listening import listen_host
from workers.actors.order import ActorFacts, ActorOrder, describe, environment, inherited
from workers.compiler_cache.transfer import compiler_cache
from workers.engines.process import ServerCommand, ServerExit, ServerProcess

LOGS = "logs"
"""Folder of server logs under a local output root."""


class ServerActor(ABC):
    """Asyncio actor. The server dies with it; it survives its server to say how that ended."""

    def __init__(self, order: ActorOrder) -> None:
        self._order = order
        self._spec = spec_of(order.run)
        self._server: ServerProcess | None = None
        self._starting: asyncio.Task[ServerProcess] | None = None
        self._command: ServerCommand | None = None

    @abstractmethod
    def command(self) -> ServerCommand:
        """What to run, after what it reads has come to this host. Blocks."""

    async def start(self) -> ActorFacts:
        """Start the server and return when it serves. A repeated call joins the first.

        Raises:
            ConfigurationError: it refuses the model or its options.
            EngineLost: what it reads did not come in time, it ended, or it was not ready in time;
                the message holds its last log lines.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._begin())
        self._server = await asyncio.shield(self._starting)
        return await self.facts()

    async def _begin(self) -> ServerProcess:
        factor = self._order.timeout_factor
        limit_s = factor * self._spec.launch.download_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                self._command = await asyncio.to_thread(self.command)
        except TimeoutError as error:
            raise EngineLost(
                f"{self._order.name}: what it serves did not come to {socket.gethostname()} within "
                f"{limit_s:g} s (launch.download_timeout_s)"
            ) from error
        timeout_s = factor * self._spec.inference.start_timeout_s
        return await ServerProcess.start(self._command, timeout_s)

    async def publish_cache(self) -> dict[str, Any] | None:
        """Publish what the server compiled; what became of it, or none without a cache."""
        told = {} if self._command is None else self._command.env
        cache = compiler_cache(self._order.role, told)
        return None if cache is None else await asyncio.to_thread(cache.publish)

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


def module_command(
    order: ActorOrder,
    spec: RunSpec,
    module: str,
    options: list[str],
    threads: int,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> ServerCommand:
    """``python -m module`` on a free port of this node, with the environment of its role.

    ``variables`` stand above all others.
    """
    store = store_of(order.run)
    ready_file = Path(order.scratch) / f"{order.name}.{order.incarnation}.ready.json"
    logs = store.local_path(LOGS) if store.is_local else Path(order.scratch)
    argv = (
        *(sys.executable, "-m", module),
        *("--host", listen_host(order), "--port", "0", "--ready-file", str(ready_file)),
        *options,
    )
    return ServerCommand(
        name=order.name,
        argv=argv,
        env=inherited({**environment(order, spec, threads), **variables}),
        log_path=logs / f"{order.name}.log",
        ready_file=ready_file,
    )
