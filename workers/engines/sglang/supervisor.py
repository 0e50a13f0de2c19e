"""One SGLang server from its start to the last of its processes.

The server is a child bound to this process's life, in its process group. The port is held by a
bound socket that does not listen, so that nobody else is given it before the server listens there.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from activities.wire.client import EngineClient
from models.errors import ConfigurationError, ContractViolation, ServiceUnreachable
from workers.compiler_cache.transfer import compiler_cache
from workers.engines.lifecycle import write_ready_file
from workers.engines.process import CONFIGURATION_STATUS, leashed
from workers.engines.sglang.arguments import flags
from workers.engines.sglang.descendants import (
    adopt_orphans,
    end_descendants,
    first_end,
    outlive_parent_to_clean_up,
    parts,
)
from workers.engines.sglang.installed import require_arguments, sglang_python
from workers.engines.sglang.options import Options

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 25.0
"""SGLang itself gives up after 20 s."""
PROBE_INTERVAL_S = 0.2
FAILED_STATUS = 1
_ROOT = Path(__file__).parents[3]
_BOOT = (
    "import sys; sys.path.append({root!r}); "
    "from workers.engines.sglang.server import main; main(sys.argv[2:], sys.argv[1])"
)
"""Our package comes last on the path of an interpreter that may be another environment's."""


class Supervisor:
    """Starts the server, tells when it serves, ends with it or ends it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._stopped = asyncio.Event()
        self._over = threading.Event()
        self._cache = compiler_cache("engine", os.environ)

    async def run(self) -> int:
        """Exit status: 0 after a signal, 2 when the server refuses what it is asked, else 1.

        Raises:
            ConfigurationError: SGLang is missing or lacks an argument, or the port is taken.
        """
        require_arguments(self._options.arguments)
        adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        outlive_parent_to_clean_up()
        if self._cache is not None:
            await asyncio.to_thread(self._cache.restore)
        with reserved_port(self._options.host, self._options.port) as port:
            child = await asyncio.create_subprocess_exec(
                *leashed(self._command(port)), stdin=asyncio.subprocess.DEVNULL
            )
            try:
                return await self._attend(child, port)
            finally:
                self._over.set()
                await self._end(child)

    def _command(self, port: int) -> list[str]:
        arguments = self._options.arguments
        line = flags({**arguments, "host": self._options.host, "port": port})
        boot = _BOOT.format(root=str(_ROOT))
        return [sglang_python(), "-c", boot, str(arguments["model_path"]), *line]

    async def _attend(self, child: asyncio.subprocess.Process, port: int) -> int:
        """Wait for the server to serve, and then for whatever ends it."""
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                ended = await self._unless_over(child, self._until_ready(port))
        except TimeoutError:
            limit = self._options.start_timeout_s
            logger.error("the server did not serve within %g s", limit)
            return FAILED_STATUS
        if ended is not None:
            return ended if ended in (0, CONFIGURATION_STATUS) else FAILED_STATUS
        titles = dict(parts())  # before anybody knows that there is something to end
        if self._options.ready_file is not None:
            write_ready_file(self._options.ready_file, self._options.host, port)
        logger.info("serving on %s port %d", self._options.host, port)
        if self._cache is not None:
            self._cache.publish_regularly(self._over)
        ended = await self._unless_over(child, until_one_ends(titles))
        return 0 if ended == 0 else FAILED_STATUS

    async def _unless_over(
        self, child: asyncio.subprocess.Process, work: Coroutine[Any, Any, None]
    ) -> int | None:
        """None once ``work`` is done; the server's exit status, or 0 after a signal, before."""
        working = asyncio.ensure_future(work)
        exiting = asyncio.ensure_future(child.wait())
        stopping = asyncio.ensure_future(self._stopped.wait())
        tasks = (working, exiting, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return 0
            if exiting.done():
                logger.error("the server ended with status %d", exiting.result())
                return exiting.result() or FAILED_STATUS
            working.result()
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_ready(self, port: int) -> None:
        """Wait until the server generates, without a stop of seconds or more later on."""
        url = f"http://{self._options.host}:{port}"
        async with contextlib.aclosing(EngineClient(url)) as client:
            await until_healthy(client)
            await self._warm(client)
            await _freeze(client)

    async def _warm(self, client: EngineClient) -> None:
        """Have the sampler compiled that a batch of unlike requests takes.

        SGLang warms up with one greedy request. FlashInfer 0.6.15 compiles at the first batch of
        unlike ones, such as a look at the server's health and the samples behind it: over a minute
        in which the scheduler stands still, so that no pause ends and the engine counts as hung.
        """
        try:
            await client.warm_sampling(timeout_s=self._options.start_timeout_s)
        except (ServiceUnreachable, ContractViolation) as error:
            logger.warning("the first unlike samples may take long: %s", error.message)

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        left = await end_descendants(child)
        if left:
            logger.error("processes outlived SIGKILL: %s", left)


async def _freeze(client: EngineClient) -> None:
    """Make the server's full searches for garbage short.

    One stops a process for half a second, after the requests of a few updates (SGLang 0.5.18 does
    the same by itself).
    """
    try:
        await client.freeze_garbage()
    except (ServiceUnreachable, ContractViolation) as error:
        logger.warning("searches for garbage stay long: %s", error.message)
        return
    # It is answered before the last process has done it; a token passes through all.
    await until_healthy(client)


async def until_healthy(client: EngineClient) -> None:
    """Return when the server has generated a token for a look at its health."""
    while True:
        if await client.health(timeout_s=HEALTH_TIMEOUT_S):
            return
        await asyncio.sleep(PROBE_INTERVAL_S)


async def until_one_ends(titles: Mapping[psutil.Process, str]) -> None:
    """Return when one of these processes has ended, and log which."""
    ended = await first_end(list(titles))
    logger.error("%s (process %d) ended", titles[ended], ended.pid)


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold ``port``, or a free one for 0, until the block ends.

    Raises:
        ConfigurationError: the address is taken or foreign.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        # With this on both sides the server may bind what is only held, and listen.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigurationError(f"cannot bind {host} port {port}: {reason}") from error
        yield int(holder.getsockname()[1])
