"""The supervisor: one process that keeps the four services alive.

::

    lock -> read stack.json (ports, pids) -> adopt what lives -> for each service, forever:
        wait for its needs -> start -> wait until ready -> wait until it ends -> back off -> again

SIGTERM or SIGINT: stop in reverse order and leave. SIGKILL: the services live on and the next
supervisor adopts them by pid and creation time, or ends them when it is to listen elsewhere.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import IO

import psutil
import structlog

from workers.local_stack.processes import Child, kill_session, tail
from workers.local_stack.services import Service, build_services, environment, is_ready
from workers.local_stack.state import (
    ProcessStatus,
    StackInfo,
    StackStatus,
    make_private,
    ray_temp_dir,
    read_status,
    write_status,
)

log = structlog.get_logger(__name__)

READY_POLL_S = 0.1
READY_TIMEOUT_S = 120.0
ONCE_READY_TIMEOUT_S = 10.0
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
STEADY_S = 10.0
"""A service that lived this long starts over with the first back-off."""
GRACE_S = {"gpu": 12.0}
"""Seconds between SIGTERM and SIGKILL; 5 for every other service."""


def take_lock(folder: Path) -> IO[str] | None:
    """The supervisor's lock; None when another supervisor lives."""
    stream = (folder / "supervisor.lock").open("a")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        return None
    return stream


class Supervisor:
    """Keeps the services of one state folder alive."""

    def __init__(self, info: StackInfo, folder: Path, services: tuple[Service, ...]) -> None:
        self._info = info
        self._folder = folder
        self._services = services
        self._env = environment(info, folder)
        self._children: dict[str, Child] = {}
        self._restarts = dict.fromkeys((service.name for service in self._services), 0)
        self._last_exit = dict.fromkeys((service.name for service in self._services), "")
        self._ready = {service.name: asyncio.Event() for service in self._services}
        self._log_start = dict.fromkeys((service.name for service in self._services), 0)
        self._failing = ""

    async def run(self) -> None:
        """Supervise until SIGTERM or SIGINT, then stop everything in reverse order."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        previous = read_status(self._folder)
        for status in reversed(previous.processes) if previous else ():
            if previous and previous.info == self._info:
                self._adopt(status)
            else:
                await self._end(status)
        keepers = [asyncio.create_task(self._keep(service)) for service in self._services]
        try:
            await stopping.wait()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
        for event in self._ready.values():
            event.clear()
        self._write()
        for service in reversed(self._services):
            if child := self._children.pop(service.name, None):
                await child.stop(_grace_s(service.name))
                self._write()

    def _adopt(self, status: ProcessStatus) -> None:
        child = Child.adopt(status)
        if child is None:
            # A Ray head leaves agents behind when only its first process was killed.
            kill_session(status.pid, status.create_time)
            return
        log.info("adopted", service=status.name, pid=status.pid)
        self._children[status.name] = child
        self._ready[status.name].set()

    async def _end(self, status: ProcessStatus) -> None:
        """End a service of an earlier supervisor, which listens where nobody looks any more."""
        child = Child.adopt(status)
        if child is not None:
            await child.stop(_grace_s(status.name))
        kill_session(status.pid, status.create_time)

    async def _keep(self, service: Service) -> None:
        backoff = BACKOFF_FIRST_S
        while True:
            for need in service.needs:
                await self._ready[need].wait()
            started = asyncio.get_running_loop().time()
            try:
                await self._live(service)
            except OSError as error:
                # No log folder, no space, no descriptors: what fails now may go well later.
                log.error("not started", service=service.name, why=str(error))
            if asyncio.get_running_loop().time() - started > STEADY_S:
                backoff = BACKOFF_FIRST_S
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, BACKOFF_MAX_S)

    async def _live(self, service: Service) -> None:
        """One life of a service, from its start to its end."""
        child = self._children.get(service.name) or self._start(service)
        if not self._ready[service.name].is_set():
            await self._await_ready(service, child)
        self._write()
        ended = await child.wait()
        self._note_end(service, child, ended)

    def _start(self, service: Service) -> Child:
        path = self._log_path(service)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start[service.name] = path.stat().st_size if path.exists() else 0
        child = Child.start(service.name, service.argv, self._env, path)
        self._children[service.name] = child
        log.info("started", service=service.name, pid=child.pid)
        self._write()
        return child

    async def _await_ready(self, service: Service, child: Child) -> None:
        """Set the ready event; give up quietly when the child ends (its keeper restarts it)."""
        ending = asyncio.create_task(child.wait())
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not ending.done():
                    if await is_ready(
                        service, self._log_path(service), self._log_start[service.name]
                    ):
                        await _run_once_ready(service, self._env)
                        self._ready[service.name].set()
                        self._failing = ""
                        return
                    await asyncio.wait({ending}, timeout=READY_POLL_S)
        except TimeoutError:
            log.error("not ready in time", service=service.name, timeout_s=READY_TIMEOUT_S)
            await child.stop(_grace_s(service.name))
        finally:
            ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ending

    def _note_end(self, service: Service, child: Child, ended: str) -> None:
        kill_session(child.pid, child.create_time)
        for other in self._services:
            if service.name in other.dies_with and other.name in self._children:
                kill_session(self._children[other.name].pid, self._children[other.name].create_time)
        self._children.pop(service.name, None)
        self._ready[service.name].clear()
        self._restarts[service.name] += 1
        self._last_exit[service.name] = ended
        self._failing = f"{service.name} ended ({ended}):\n{tail(self._log_path(service))}"
        log.warning("ended", service=service.name, how=ended)
        self._write()

    def _log_path(self, service: Service) -> Path:
        return self._info.log_dir / f"{service.name}.log"

    def _write(self) -> None:
        try:
            write_status(self._folder, self._status())
        except OSError as error:
            # A state folder that is gone or full must not keep services from being stopped.
            log.error("status not written", folder=str(self._folder), why=error.strerror)

    def _status(self) -> StackStatus:
        return StackStatus(
            info=self._info,
            supervisor_pid=os.getpid(),
            supervisor_create_time=psutil.Process().create_time(),
            ready=all(event.is_set() for event in self._ready.values()),
            num_ends=sum(self._restarts.values()),
            failing=self._failing,
            processes=tuple(
                ProcessStatus(
                    name=child.name,
                    pid=child.pid,
                    create_time=child.create_time,
                    restarts=self._restarts[child.name],
                    last_exit=self._last_exit[child.name],
                )
                for child in self._children.values()
            ),
        )


def _grace_s(name: str) -> float:
    return GRACE_S.get(name, 5.0)


async def _run_once_ready(service: Service, env: dict[str, str]) -> None:
    """Run the service's set-up command; a failure is a warning, the service itself works."""
    if not service.once_ready:
        return
    process = await asyncio.create_subprocess_exec(
        *service.once_ready,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(ONCE_READY_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        errors = b"deadline passed"
    if process.returncode != 0:
        log.warning("set-up failed", service=service.name, errors=errors.decode().strip())


def supervise(info: StackInfo, folder: Path) -> int:
    """Entry of the supervisor process. Returns 0 also when another supervisor lives."""
    lock = take_lock(folder)
    if lock is None:
        return 0
    with lock:
        if info.own_ray:
            make_private(ray_temp_dir(folder).parent)
        asyncio.run(Supervisor(info, folder, build_services(info, folder)).run())
    return 0


def main() -> None:
    """``python -m workers.local_stack.supervisor INFO_JSON``."""
    info = StackInfo.model_validate_json(sys.argv[1])
    sys.exit(supervise(info, Path(info.state_dir)))


if __name__ == "__main__":
    main()
