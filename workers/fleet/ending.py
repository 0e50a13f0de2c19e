"""Ending: revoke an epoch in every component, tear a fleet down, reap fleets nobody owns."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import psutil
import structlog

from models.errors import PerdureError
from models.ids import RunRef
from workers.actors.order import ActorFacts, parse_actor_name
from workers.fleet.calls import RemoteActor
from workers.fleet.cluster import RayCluster
from workers.fleet.engines import Engines
from workers.fleet.folders import remove_run_folders
from workers.fleet.placement import unplace
from workers.fleet.run_fleet import LOST, Cause, RunFleet

GRACE_S = 3.0
"""For a server's clean end and for components to close."""
CLOSE_TIMEOUT_S = 8.0
EXIT_TIMEOUT_S = 10.0
RUN_ID_PREFIX = "train/"
"""Only namespaces of runs are ever reaped; a cluster may host other applications."""

_log = structlog.get_logger(__name__)


async def revoke(fleet: RunFleet, epoch: int) -> None:
    """Refuse ``epoch`` and below in trainer and producer; dead ones need no refusing."""
    for role in ("trainer", "producer"):
        with contextlib.suppress(PerdureError):
            await fleet.actor(role).call("revoke", epoch)


async def teardown(fleet: RunFleet, engines: Engines) -> None:
    """End every process of the run, release its placement, delete its folders on this host.

    Works on whatever is left of a fleet and may be repeated. The caller holds ``fleet.lock``.
    """
    await engines.close()
    names = await _names_of(fleet.cluster, fleet.run.run_id)
    await asyncio.gather(*(end_actor(fleet, name) for name in names))
    for role in ("trainer", "engines"):
        await unplace(fleet.cluster, fleet.run.run_id, role)
    rows = await fleet.rows()
    if rows:
        await fleet.remember(*(row.model_copy(update={"alive": False}) for row in rows))
    await asyncio.to_thread(remove_run_folders, fleet.run.root)
    _log.info("fleet ended", run=fleet.run.run_id, actors=names)


async def end_actor(fleet: RunFleet, name: str, cause: Cause | None = None) -> None:
    """A clean end within a deadline, then the kill. Errors of a dying actor do not matter.

    Nothing happens when no actor has the name. The caller holds ``fleet.lock``. ``cause``: why it
    will live again, unless it is dead already of something else.
    """
    role, rank = _parsed(name)
    actor = fleet.actor(role, rank)
    facts = await fleet.facts(role, rank)
    if cause is not None:
        fleet.note(name, cause)
    with contextlib.suppress(PerdureError):
        if role in ("engine", "router"):
            await actor.call("stop", GRACE_S, timeout_s=CLOSE_TIMEOUT_S)
        else:
            await actor.call("close", timeout_s=GRACE_S)
    await fleet.cluster.kill_named(fleet.run.run_id, name)
    if facts is not None and facts.status.host == socket.gethostname():
        await _until_gone({facts.actor_pid, facts.status.pid}, name)


async def runs_with_actors(cluster: RayCluster) -> set[str]:
    """Ids of the runs that have actors in the cluster."""
    return {
        namespace
        for namespace, name in await cluster.named_actors()
        if namespace.startswith(RUN_ID_PREFIX) and parse_actor_name(name) is not None
    }


async def find_run(cluster: RayCluster, run_id: str) -> RunRef | None:
    """The run that a namespace's actors were made for, asked of the actors themselves."""
    for name in await _names_of(cluster, run_id):
        role, _ = _parsed(name)
        with contextlib.suppress(PerdureError):
            facts: ActorFacts = await RemoteActor(cluster, run_id, name, LOST[role]).call(
                "facts", timeout_s=CLOSE_TIMEOUT_S
            )
            return facts.order.run
    return None


async def kill_namespace(cluster: RayCluster, run_id: str) -> None:
    """Kill every actor of a run whose root is not known any more."""
    for name in await _names_of(cluster, run_id):
        await cluster.kill_named(run_id, name)
    for role in ("trainer", "engines"):
        await unplace(cluster, run_id, role)


IsOpen = Callable[[str], Awaitable[bool]]


async def _names_of(cluster: RayCluster, run_id: str) -> list[str]:
    return sorted(
        name
        for namespace, name in await cluster.named_actors()
        if namespace == run_id and parse_actor_name(name) is not None
    )


async def _until_gone(pids: set[int], name: str) -> None:
    """Wait for processes of this host that were killed: they may still hold memory and files."""
    deadline = asyncio.get_running_loop().time() + EXIT_TIMEOUT_S
    while any(psutil.pid_exists(pid) for pid in pids):
        if asyncio.get_running_loop().time() > deadline:
            _log.warning("process survives its kill", actor=name, pids=sorted(pids))
            return
        await asyncio.sleep(0.01)


def _parsed(name: str) -> tuple[str, int]:
    parsed = parse_actor_name(name)
    if parsed is None:
        raise ValueError(f"{name!r} is not an actor's name")
    return parsed
