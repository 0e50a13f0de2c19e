"""A folder of weights that a thread of its own writes while the trainer works."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from models.errors import PerdureError
from models.publication import WeightsRef

_log = structlog.get_logger(__name__)


class FolderWriting:
    """At most one folder at a time. ``begin`` and ``end`` are for one thread, ``of`` for any."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: tuple[int, Future[WeightsRef]] | None = None

    def begin(self, version: int, write: Callable[[], WeightsRef]) -> None:
        """Let ``write`` make the folder of ``version``; the one before must have ended."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-folder")
        self._running = (version, self._pool.submit(write))

    def knows(self, version: int) -> bool:
        """Whether the folder of ``version`` was begun last and has not failed."""
        running = self._running
        if running is None or running[0] != version:
            return False
        return not running[1].done() or running[1].exception() is None

    def of(self, version: int) -> WeightsRef | None:
        """The folder of ``version``, once it is there; None when it is not being written."""
        running = self._running
        if running is None or running[0] != version:
            return None
        try:
            return running[1].result()
        except (PerdureError, OSError) as error:
            _log.warning("weights were not written", version=version, reason=str(error))
            return None

    def end(self) -> None:
        """Wait for the folder that is being written. Raises what kept it from being there."""
        running, self._running = self._running, None
        if running is not None:
            running[1].result()

    def close(self) -> None:
        """Wait for what is being written, whatever becomes of it."""
        self._running = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
