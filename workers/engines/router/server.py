"""One router process from socket to exit status."""

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn

from workers.engines.lifecycle import watch_parent, write_ready_file
from workers.engines.router.app import RouterApp
from workers.engines.router.balancer import Balancer
from workers.engines.router.groups import Groups
from workers.engines.router.health import HealthLoop
from workers.engines.router.options import RouterOptions
from workers.engines.router.table import Table
from workers.engines.token_gate import guarded

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2
"""How long the answers to calls that were ended at shutdown may take to reach their clients."""


class RouterServer:
    """The HTTP server, the health loop and the way out. Needs a running event loop."""

    def __init__(self, options: RouterOptions, token: str | None) -> None:
        """``token``: asked of clients, see ``take_token``, and brought to engines."""
        self._options = options
        self._table = Table(Groups(options.group_expiry_s), token)
        self._balancer = Balancer(self._table, options.max_queued_requests, options.queue_timeout_s)
        self._health = HealthLoop(self._table, options)
        config = uvicorn.Config(
            guarded(RouterApp(self._table, self._balancer), token),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=options.keep_alive_s,  # type: ignore[arg-type]  # seconds, any number
            timeout_graceful_shutdown=round(options.shutdown_timeout_s) + CLOSE_TIMEOUT_S,
        )
        self._http = _Server(config, self)

    async def run(self, listener: socket.socket) -> None:
        """Serve until SIGTERM or SIGINT; raises what ends the health loop."""
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        watching = [asyncio.create_task(self._health.run())]
        if self._options.exit_with_parent:
            watching.append(asyncio.create_task(watch_parent()))
        host, port = listener.getsockname()[:2]
        if self._options.ready_file is not None:
            write_ready_file(self._options.ready_file, host, port)
        logger.info("routing on %s port %d", host, port)
        try:
            done, _ = await asyncio.wait({serving, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._table.close()
            self._http.should_exit = True
            for task in watching:
                task.cancel()
            await asyncio.wait({serving}, timeout=CLOSE_TIMEOUT_S)

    def begin_stop(self) -> None:
        """Accept nothing more; what runs may end within the bound, then it is cut."""
        self._balancer.stop()
        self._http.should_exit = True
        asyncio.get_running_loop().call_later(self._options.shutdown_timeout_s, self._table.close)


class _Server(uvicorn.Server):
    """uvicorn whose first signal lets calls finish."""

    def __init__(self, config: uvicorn.Config, router: RouterServer) -> None:
        super().__init__(config)
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._stopping = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: finish what runs. Second: at once."""
        logger.info("received %s", signal.Signals(sig).name)
        if self._stopping:
            self.force_exit = self.should_exit = True
        self._stopping = True
        self._loop.call_soon_threadsafe(self._router.begin_stop)
