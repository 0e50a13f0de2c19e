"""One Ray cluster, joined by address: find, create and kill named actors. Nothing else does.

Every call of Ray that blocks runs in a thread under a deadline, and Ray is imported at the first
join: a process that never needs it stays light.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

from models.errors import ServiceUnreachable
from workers.ray_address import VARIABLE, require_listener

T = TypeVar("T")

DRIVER_NAMESPACE = "perdure"
"""Namespace of this process itself; each run's actors live in the namespace of its id."""

JOIN_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 30.0
"""For one call of Ray's control service; it answers in milliseconds when it lives."""
NAME_POLL_S = 0.02
CREATE_ATTEMPTS = 5
"""A name may be taken between its release and its use, by one late competitor or two."""


class RayCluster:
    """A driver's view of the cluster at ``address`` (``host:port``; None: ``RAY_ADDRESS``)."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address or os.environ.get(VARIABLE, "")
        self._joining: asyncio.Future[None] | None = None

    async def join(self) -> None:
        """Connect once; later calls return at once.

        Raises:
            ServiceUnreachable: no address is known, nobody listens there, or Ray does not answer.
        """
        if self._joining is None:
            await require_listener(self._address)
            self._joining = asyncio.ensure_future(asyncio.to_thread(self._connect))
        joining = self._joining
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await asyncio.shield(joining)
        except TimeoutError as error:
            raise ServiceUnreachable(
                f"Ray at {self._address} did not answer within {JOIN_TIMEOUT_S:g} s"
            ) from error
        except (OSError, RuntimeError, ValueError) as error:
            self._joining = None
            raise ServiceUnreachable(f"cannot join Ray at {self._address}: {error}") from error

    async def leave(self) -> None:
        """Disconnect this process; detached actors go on. Nothing happens when never joined."""
        if self._joining is None:
            return
        self._joining = None

        def disconnect() -> None:
            import ray

            ray.shutdown()

        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await asyncio.to_thread(disconnect)

    async def find(self, namespace: str, name: str) -> Any | None:
        """Handle of a named actor; None when there is none."""

        def look() -> Any | None:
            import ray

            try:
                return ray.get_actor(name, namespace=namespace)
            except ValueError:
                return None

        return await self.control(look, f"look for actor {name}")

    async def create(
        self,
        actor_class: type,
        namespace: str,
        name: str,
        options: dict[str, Any],
        class_options: dict[str, Any],
        *args: Any,
    ) -> Any:
        """Create a detached named actor that Ray never restarts; an older one of the name ends.

        ``class_options`` are those that Ray takes for the class only (concurrency groups). The
        actor may be placed and started later: its first call tells.
        """

        def make() -> Any | None:
            import ray
            from ray.exceptions import ActorAlreadyExistsError

            made = ray.remote(max_restarts=0, max_task_retries=0, **class_options)(actor_class)
            placed = made.options(name=name, namespace=namespace, lifetime="detached", **options)
            try:
                return placed.remote(*args)
            except ActorAlreadyExistsError:
                return None

        for _ in range(CREATE_ATTEMPTS):
            await self.kill_named(namespace, name)
            handle = await self.control(make, f"create actor {name}")
            if handle is not None:
                return handle
            # A call that was cancelled in a thread has created it late.
        raise ServiceUnreachable(
            f"actor {name} of {namespace} is created again and again by another process"
        )

    async def create_bound(self, actor_class: type, options: dict[str, Any], *args: Any) -> Any:
        """Create an actor without a name that ends with this process."""

        def make() -> Any:
            import ray

            return ray.remote(max_restarts=0, **options)(actor_class).remote(*args)

        return await self.control(make, f"create {actor_class.__name__}")

    async def kill(self, handle: Any) -> None:
        """End an actor's process at once. Nothing happens when it is dead."""

        def end() -> None:
            import ray

            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(handle, no_restart=True)

        await self.control(end, "kill an actor")

    async def kill_named(self, namespace: str, name: str) -> None:
        """Kill the actor of that name, if any, and wait until the name is free."""
        handle = await self.find(namespace, name)
        if handle is not None:
            await self.kill(handle)
            await self._until_free(namespace, name)

    async def named_actors(self) -> list[tuple[str, str]]:
        """(namespace, name) of every named actor of the cluster."""

        def look() -> list[tuple[str, str]]:
            from ray.util import list_named_actors

            rows = list_named_actors(all_namespaces=True)
            return [(row["namespace"], row["name"]) for row in rows]

        return await self.control(look, "list actors")

    async def control(
        self, call: Callable[[], T], what: str, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> T:
        """Run a blocking call of Ray in a thread; joins first.

        Raises:
            ServiceUnreachable: no answer within ``timeout_s`` seconds, or the connection is gone.
        """
        await self.join()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(call)
        except (TimeoutError, ConnectionError) as error:
            raise ServiceUnreachable(
                f"Ray at {self._address} did not {what} within {timeout_s:g} s: {error}"
            ) from error

    async def _until_free(self, namespace: str, name: str) -> None:
        """Wait until no live actor holds the name: a killed one does for a moment."""
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                while await self.find(namespace, name) is not None:  # noqa: ASYNC110  Ray's event
                    await asyncio.sleep(NAME_POLL_S)
        except TimeoutError as error:
            raise ServiceUnreachable(
                f"actor {name} of {namespace} still holds its name after {CONTROL_TIMEOUT_S:g} s"
            ) from error

    def _connect(self) -> None:
        if self._address.startswith(("127.", "localhost")):
            # Read when Ray is imported; without it Ray turns a loopback address into the host's
            # outside one, where a cluster that listens on loopback does not answer.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        # Ray warns that it sets no SIGTERM handler from a thread; the worker has its own.
        logging.getLogger("ray").setLevel(logging.ERROR)
        if not ray.is_initialized():
            ray.init(
                address=self._address,
                namespace=DRIVER_NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
            )
