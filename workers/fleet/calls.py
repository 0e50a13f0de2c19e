"""Calling an actor: found by name, errors brought back as Perdure's own, nothing orphaned."""

import asyncio
from typing import Any

import structlog

from activities.slow_waits import told_while_slow
from models.errors import ActorLost, PerdureError, ServiceUnreachable, all_errors
from workers.fleet.cluster import RayCluster

QUICK_TIMEOUT_S = 30.0
"""For calls that an actor answers from memory, on a machine whose cores are all busy."""
UNAVAILABLE_PATIENCE_S = 10.0
"""How long an actor may be out of reach (a broken connection) before it is taken for dead."""
_UNAVAILABLE_POLL_S = 0.2
_REASON_CHARS = 300

_log = structlog.get_logger(__name__)


class _OutOfReachError(Exception):
    """Ray cannot tell whether the call ran; the actor may be alive."""


class RemoteActor:
    """The actor ``name`` of a run, looked up when first needed and again after a replacement.

    A dead actor's call ends at once with ``lost``; a call that Ray cannot account for is repeated,
    which is safe because every call is idempotent under its token.
    """

    def __init__(self, cluster: RayCluster, run_id: str, name: str, lost: type[ActorLost]) -> None:
        self._cluster = cluster
        self._run_id = run_id
        self.name = name
        self._lost = lost
        self._handle: Any | None = None
        self.loss: ActorLost | None = None
        """The first sign that the newest known actor of this name is dead."""

    def adopt(self, handle: Any) -> None:
        """Use a handle that was just created."""
        self._handle = handle
        self.loss = None

    async def handle(self) -> Any:
        """The actor's handle; raises ``lost`` when no actor has the name."""
        if self._handle is None:
            self._handle = await self._cluster.find(self._run_id, self.name)
        if self._handle is None:
            raise self._lost(f"{self.name} of {self._run_id} is not running")
        return self._handle

    async def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float | None = QUICK_TIMEOUT_S,
        cancel: bool = False,
        follow: bool = True,
    ) -> Any:
        """Result of ``method(*args)``. Without ``timeout_s`` the actor's life is the only limit.

        ``cancel`` ends the actor's work when the caller is cancelled; otherwise it goes on and a
        repeated call joins it. Without ``follow`` a replacement is never asked instead.

        Raises:
            ActorLost: the actor is dead (the leaf for its role).
            ServiceUnreachable: no answer within ``timeout_s`` seconds.
            Exception: whatever the method raised.
        """
        await self._cluster.join()
        handle = await self.handle()
        try:
            return await self._once(handle, method, args, timeout_s, cancel)
        except self._lost as error:
            self.loss = self.loss or error
            newer = await self._replacement(handle)
            if newer is None or not follow:
                raise
            return await self._once(newer, method, args, timeout_s, cancel)

    async def _once(
        self, handle: Any, method: str, args: tuple[Any, ...], timeout_s: float | None, cancel: bool
    ) -> Any:
        """One call, repeated while the actor is out of reach but not known to be dead."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + UNAVAILABLE_PATIENCE_S
        while True:
            try:
                return await settle(
                    getattr(handle, method).remote(*args),
                    f"{self.name} of {self._run_id}",
                    self._lost,
                    f"{method}()",
                    timeout_s,
                    cancel,
                )
            except _OutOfReachError as error:
                if loop.time() > deadline:
                    raise self._lost(f"{self.name} of {self._run_id}: {error}") from error
                _log.warning("actor out of reach", actor=self.name, run=self._run_id)
                await asyncio.sleep(_UNAVAILABLE_POLL_S)

    async def _replacement(self, dead: Any) -> Any | None:
        """Another actor of the same name, when somebody else has rebuilt it meanwhile."""
        self._handle = None
        found = await self._cluster.find(self._run_id, self.name)
        # Ray identifies an actor by its id; the public handle offers no comparison.
        if found is None or found._actor_id == dead._actor_id:
            return None
        self.adopt(found)
        return found


async def settle(
    ref: Any,
    who: str,
    lost: type[ActorLost],
    what: str,
    timeout_s: float | None,
    cancel: bool = False,
) -> Any:
    """Await a call's ``ref``; see ``RemoteActor.call`` for what is raised."""
    import ray
    from ray.exceptions import (
        ActorUnavailableError,
        RayActorError,
        RayTaskError,
        TaskCancelledError,
    )

    try:
        if timeout_s is None:
            return await ref  # the work itself, which has a watch of its own
        with told_while_slow(f"{who}: {what}", timeout_s):
            async with asyncio.timeout(timeout_s):
                return await ref
    except asyncio.CancelledError:
        if cancel:
            ray.cancel(ref)
        raise
    except RayTaskError as error:
        raise _cause(error) from None
    except ActorUnavailableError as error:
        raise _OutOfReachError(_reason(error)) from error
    except RayActorError as error:
        if (refusal := _refusal(error)) is not None:
            raise refusal from error
        raise lost(f"{who} died during {what}: {_reason(error)}") from error
    except TaskCancelledError as error:
        raise lost(f"{who}: {what} was cancelled inside the actor") from error
    except TimeoutError as error:
        if cancel:
            ray.cancel(ref)
        raise ServiceUnreachable(f"{who} did not answer {what} within {timeout_s} s") from error


def _cause(error: Any) -> BaseException:
    """What the actor's method raised, with the actor's traceback as a note."""
    cause = error.cause
    if not isinstance(cause, BaseException):
        return RuntimeError(str(error))
    cause.add_note(f"raised inside an actor:\n{error}")
    return cause


def _refusal(error: Exception) -> PerdureError | None:
    """What the actor's constructor raised, where no repetition helps; Ray has it as text only."""
    text = str(error).strip()
    kind, _, message = text.rpartition("\n")[2].partition(": ")
    for leaf in all_errors():
        if kind == f"{leaf.__module__}.{leaf.__qualname__}" and not leaf.retryable:
            return leaf(message) if "creation task" in text else None
    return None


def _reason(error: Exception) -> str:
    """Ray's explanation on one short line."""
    return " ".join(str(error).split())[:_REASON_CHARS]
