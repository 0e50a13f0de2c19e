"""The one thread that runs the model, and the queue through which the event loop talks to it."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from models.errors import ConfigurationError
from workers.engines.native.answers import PayloadError
from workers.engines.native.model_shape import ModelShape
from workers.engines.native.options import EngineOptions
from workers.engines.native.request import Event, Request
from workers.engines.native.text import TextCodec

if TYPE_CHECKING:
    from workers.engines.native.core import Core

logger = logging.getLogger(__name__)

T = TypeVar("T")
IDLE_POLL_S = 0.1
"""How often a thread with waiting but paused requests looks at their time-outs."""

Deliver = Callable[[list[tuple[Request, Event]]], None]
Command = Callable[["Core"], None]


class ModelThread:
    """Starts the model thread; ``submit`` and ``call`` may be used from the event loop."""

    def __init__(
        self,
        options: EngineOptions,
        shape: ModelShape,
        context_length: int,
        codec: TextCodec,
        deliver: Deliver,
    ) -> None:
        self._options, self._shape, self._codec = options, shape, codec
        self._context_length = context_length
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._events: list[tuple[Request, Event]] = []
        self.loaded: asyncio.Future[None] = self._loop.create_future()
        """Done when the weights are loaded; carries the error when they cannot be."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the thread ended; carries the error that ended it."""
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Begin to import torch and to load the weights."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the current step."""
        self._commands.put(None)

    def submit(self, request: Request) -> None:
        """Hand over a request; its events arrive through ``deliver`` on the event loop."""
        self._commands.put(lambda core: core.scheduler.add(request))

    def withdraw(self, request: Request) -> None:
        """Nobody waits for ``request`` any more: free its place."""
        self._commands.put(lambda core: core.scheduler.abort(lambda other: other is request))

    async def call(self, function: Callable[["Core"], T]) -> T:
        """Run ``function`` on the model thread between two steps and return its result.

        Raises what it refuses (PayloadError); anything else that it raises ends the engine.
        """
        answer: asyncio.Future[T] = self._loop.create_future()

        def command(core: "Core") -> None:
            try:
                result = function(core)
            except PayloadError as error:
                self._post(_fail, answer, error)
                return
            self._flush_events()
            self._post(_resolve, answer, result)

        self._commands.put(command)
        return await answer

    def _run(self) -> None:
        try:
            core = self._build()
            self._post(_resolve, self.loaded, None)
            self._serve(core)
            self._post(_resolve, self.ended, None)
        except ConfigurationError as error:
            self._post(_fail, self.loaded, error)
        except Exception as error:  # the thread's entry: nothing above could report it
            logger.exception("the model thread failed")
            self._post(_fail, self.loaded, error)
            self._post(_fail, self.ended, error)

    def _build(self) -> "Core":
        # Here and not at module level: torch is imported while the HTTP side already starts.
        from workers.engines.native.core import Core

        return Core(
            self._options,
            self._shape,
            self._context_length,
            self._codec,
            lambda request, event: self._events.append((request, event)),
        )

    def _serve(self, core: "Core") -> None:
        import torch

        busy = False
        delay_s = self._options.step_delay_s
        with torch.inference_mode():
            while self._take_commands(core, wait=not busy):
                decoded = core.scheduler.generated_tokens
                busy = core.scheduler.turn()
                if delay_s and core.scheduler.generated_tokens != decoded:
                    self._linger(core, delay_s)
                    busy = True  # a command may have brought work meanwhile
                self._flush_events()

    def _linger(self, core: "Core", delay_s: float) -> None:
        """Let the step that just ended last longer; commands do not wait, a pause ends it."""
        deadline = time.monotonic() + delay_s
        while not core.scheduler.paused and (rest := deadline - time.monotonic()) > 0:
            try:
                command = self._commands.get(timeout=rest)
            except queue.Empty:
                return
            if command is None:
                self._commands.put(None)
                return
            command(core)

    def _take_commands(self, core: "Core", wait: bool) -> bool:
        """Run what is queued; with ``wait`` block for the first. False: stop."""
        poll = IDLE_POLL_S if core.scheduler.num_requests() else None
        while True:
            try:
                command = self._commands.get(block=wait, timeout=poll)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(core)
            wait = False

    def _flush_events(self) -> None:
        if self._events:
            batch, self._events = self._events, []
            self._post(self._deliver, batch)

    def _post(self, function: Callable[..., Any], *arguments: Any) -> None:
        # The loop may be closed already when the process is on its way out.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
