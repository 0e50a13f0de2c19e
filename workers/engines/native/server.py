"""One engine process from socket to exit status."""

import asyncio
import logging
import signal
import socket
import time
from types import FrameType

import psutil
import uvicorn

from activities.wire.contract import WORKER_UNAVAILABLE
from workers.engines.lifecycle import watch_parent, write_ready_file
from workers.engines.native.app import build_app
from workers.engines.native.control import Control
from workers.engines.native.gate import Gate
from workers.engines.native.generation import Generation
from workers.engines.native.model_shape import ModelShape
from workers.engines.native.model_thread import ModelThread
from workers.engines.native.options import EngineOptions
from workers.engines.native.payload import Bounds
from workers.engines.native.request import Refused
from workers.engines.native.text import TextCodec
from workers.engines.token_gate import guarded

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 60
"""SGLang closes idle connections after 5 s, under a pooled client; this one does not."""
CLOSE_TIMEOUT_S = 2
"""How long answered connections may take to close at shutdown."""


class EngineServer:
    """HTTP server and model thread of one engine."""

    def __init__(self, options: EngineOptions, shape: ModelShape, token: str | None) -> None:
        """Needs a running event loop. ``token``: see ``take_token``."""
        limit = shape.max_positions
        self.context_length = min(options.context_length or limit, limit)
        self._options = options
        if options.context_length is not None and options.context_length > limit:
            logger.warning("--context-length is cut to the model's own limit of %d tokens", limit)
        codec = TextCodec(options.model_path)
        self._gate = Gate()
        bounds = Bounds(shape.vocab_size, self.context_length, shape.eos_token_ids, codec)
        self._generation = Generation(bounds, self._gate)
        self._model = ModelThread(
            options, shape, self.context_length, codec, self._generation.deliver
        )
        self._control = Control(
            options, shape, self.context_length, self._model, self._gate, self._generation
        )
        config = uvicorn.Config(
            guarded(build_app(self._generation, self._control, self._model), token),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        self._http = _Server(config, self)
        self._stopper: asyncio.Task[None] | None = None

    async def run(self, listener: socket.socket) -> None:
        """Serve until a signal or a failure of the model thread.

        Raises ConfigurationError for weights that cannot be loaded, else what ended the thread.
        """
        self._model.start()
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        announced = asyncio.create_task(self._announce(listener))
        ends: set[asyncio.Future[None]] = {serving, self._model.ended, announced}
        parent = asyncio.create_task(watch_parent()) if self._options.exit_with_parent else None
        try:
            while not serving.done():
                done, ends = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()
        finally:
            self._generation.fail_all(Refused(503, WORKER_UNAVAILABLE))
            self._http.should_exit = True
            self._model.stop()
            for task in (announced, parent):
                if task is not None:
                    task.cancel()
            await asyncio.wait({serving}, timeout=CLOSE_TIMEOUT_S)

    @property
    def stopping(self) -> bool:
        """Whether a first signal has arrived."""
        return self._stopper is not None

    def begin_stop(self) -> None:
        """Admit nothing more; let running requests finish, then abort them."""
        if self._stopper is None:
            self._generation.stopping = True
            self._stopper = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Wait for the last answer up to the time limit, abort what is left, end the server."""
        deadline = time.monotonic() + self._options.shutdown_timeout_s
        while self._generation.num_requests and time.monotonic() < deadline:
            # Nothing ends a paused request but an abort.
            if self._gate.paused:
                break
            await asyncio.sleep(0.02)
        self._gate.refuse_all()
        if self._model.loaded.done():
            await self._model.call(lambda core: core.abort(None))
        self._http.should_exit = True

    async def _announce(self, listener: socket.socket) -> None:
        """Write the ready file once the model is loaded; the socket has listened from the start."""
        await self._model.loaded
        self._control.ready_after_s = time.time() - psutil.Process().create_time()
        host, port = listener.getsockname()[:2]
        if self._options.ready_file is not None:
            write_ready_file(self._options.ready_file, host, port)
        logger.info("serving on %s port %d after %.2f s", host, port, self._control.ready_after_s)


class _Server(uvicorn.Server):
    """uvicorn whose signals drain first."""

    def __init__(self, config: uvicorn.Config, engine: EngineServer) -> None:
        super().__init__(config)
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: at once."""
        if self._engine.stopping:
            self.force_exit = self.should_exit = True
        self._loop.call_soon_threadsafe(self._engine.begin_stop)
        logger.info("received %s", signal.Signals(sig).name)
