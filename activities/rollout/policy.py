"""Which policy versions engines may serve now, and the boundary of a publication."""

import asyncio

from models.errors import ContractViolation, GenerationFault


class ServedPolicy:
    """The producer's view of publication; belongs to one event loop.

    A sample may carry any version up to ``newest``. While a boundary *holds*, calls that an engine
    handed back wait in ``released``; ``generation`` tells a call whether a boundary began since it
    was sent.
    """

    def __init__(self, published: int = -1) -> None:
        self._published = published
        self._publishing: int | None = None
        self._generation = 0
        self._released = asyncio.Event()
        self._released.set()

    @property
    def published(self) -> int:
        """The version that every engine was confirmed to serve; -1 before the first one."""
        return self._published

    @property
    def publishing(self) -> int | None:
        """The version that engines are loading, if any."""
        return self._publishing

    @property
    def newest(self) -> int:
        """The newest version that an engine may legally serve."""
        return self._published if self._publishing is None else self._publishing

    @property
    def generation(self) -> int:
        """Boundaries begun so far."""
        return self._generation

    def begin(self, version: int, *, holds: bool) -> None:
        """Engines load ``version`` from now on; begun again, it does nothing.

        Raises:
            ContractViolation: ``version`` is older than what is published.
        """
        if version < self._published:
            raise ContractViolation(
                f"publication of version {version} begins, but {self._published} is published"
            )
        if self._publishing == version:
            return
        self._publishing = version
        self._generation += 1
        if holds:
            self._released.clear()

    def end(self, version: int) -> None:
        """Every engine serves ``version``; ended again, it does nothing.

        Raises:
            ContractViolation: another version was begun last.
        """
        if self._publishing is None and self._published == version:
            return
        if self._publishing != version:
            raise ContractViolation(
                f"publication of version {version} ends, but the one that was begun last is of "
                f"{self.newest}"
            )
        self._published, self._publishing = version, None
        self._released.set()

    def abandon(self) -> None:
        """Forget a boundary that its epoch did not end; the next epoch publishes again."""
        self._publishing = None
        self._released.set()

    async def released(self, timeout_s: float) -> None:
        """Return when no boundary holds calls back.

        Raises:
            GenerationFault: (timeout) one still does after ``timeout_s`` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._released.is_set():  # another may begin before this task runs
                    await self._released.wait()
        except TimeoutError:
            raise GenerationFault(
                f"a publication has held this call back for {timeout_s:g} s", "timeout"
            ) from None
