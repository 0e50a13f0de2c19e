"""Which memory the engine has given back, and moving it: ``weights`` and ``kv_cache``, by tag.

A release needs a pause and an engine without requests, a resume what was released: where SGLang's
server ends, this one refuses. While anything is released nothing is generated, loaded or hashed.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from workers.engines.native.answers import ServerError

if TYPE_CHECKING:
    from workers.engines.native.scheduler import Scheduler
    from workers.engines.native.weights import WeightStore

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = frozenset((WEIGHTS, KV_CACHE))


class Occupation:
    """The memory of one engine. The model thread owns it."""

    def __init__(self, weights: "WeightStore", scheduler: "Scheduler") -> None:
        self._weights, self._scheduler = weights, scheduler
        self._released: set[str] = set()

    def release(self, tags: Collection[str]) -> None:
        """Free the memory of ``tags``, of all when empty.

        Raises:
            ServerError: generation is not paused, requests are here, or a tag is released already.
        """
        wanted = frozenset(tags or TAGS)
        held = self._scheduler.num_requests()
        if not self._scheduler.paused or held:
            raise ServerError(
                f"memory is released by a paused engine without requests; it has {held}"
            )
        if again := self._released & wanted:
            raise ServerError(f"{', '.join(sorted(again))} is released already")
        if KV_CACHE in wanted:
            self._scheduler.free_cache()
        if WEIGHTS in wanted:
            self._weights.free()
        self._released |= wanted

    def resume(self, tags: Collection[str]) -> None:
        """Allocate the memory of ``tags``, of all when empty. Weights are zero afterwards.

        Raises:
            ServerError: a tag is not released.
        """
        wanted = frozenset(tags or TAGS)
        if resident := wanted - self._released:
            raise ServerError(f"{', '.join(sorted(resident))} is not released")
        if WEIGHTS in wanted:
            self._weights.allocate()
        if KV_CACHE in wanted:
            self._scheduler.allocate_cache()
        self._released -= wanted

    def require(self, *tags: str) -> None:
        """Raise ServerError unless the memory of ``tags`` is here."""
        if missing := self._released & frozenset(tags):
            raise ServerError(f"{', '.join(sorted(missing))} is released: resume it first")
