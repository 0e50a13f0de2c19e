"""What the command line does with the stack: ensure, look, stop."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from models.errors import ConfigurationError, ServiceUnreachable
from workers.local_stack.ports import (
    LOOPBACK,
    RAY_PORT,
    TEMPORAL_PORT,
    UI_PORT,
    choose,
    is_free,
)
from workers.local_stack.processes import is_alive, kill_session, tail, wait_dead
from workers.local_stack.services import build_services
from workers.local_stack.state import StackInfo, StackStatus, read_status, state_dir
from workers.payload_keys import KEYS_FILE, payload_keys
from workers.ray_address import VARIABLE as RAY_GIVEN
from workers.ray_address import require_listener

TEMPORAL_WISH = "PERDURE_TEMPORAL_PORT"
UI_WISH = "PERDURE_TEMPORAL_UI_PORT"
RAY_WISH = "PERDURE_RAY_PORT"

START_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 45.0
YIELD_S = 0.5
"""Between looks for the supervisor that holds the lock."""
FAILING_ENDS = 3
"""Services that ended this often while the stack starts are reported with their log."""


def stack_status(folder: Path | None = None) -> StackStatus | None:
    """The stack's processes with ``alive`` checked now; None when there never was a stack."""
    status = read_status(folder or state_dir())
    if status is None:
        return None
    processes = tuple(
        process.model_copy(update={"alive": is_alive(process.pid, process.create_time)})
        for process in status.processes
    )
    return status.model_copy(update={"processes": processes})


def ensure_stack(
    folder: Path | None = None, notice: Callable[[str], None] = lambda _: None
) -> StackInfo:
    """Start the supervisor if none lives and wait until every service is ready.

    ``notice`` is told what the wait is for. A second call on a ready stack takes milliseconds.

    Raises:
        ConfigurationError: a program is missing, a wished port is taken, the folder is read-only,
            or a stack runs on other ports than are wished.
        ServiceUnreachable: ``RAY_ADDRESS`` names a cluster that does not answer, a service keeps
            ending, or is not ready within 150 s. Nothing that was started is left running.
    """
    folder = folder or state_dir()
    _make_folder(folder)
    deadline = time.monotonic() + START_TIMEOUT_S
    said = _once(notice)
    while True:
        status = stack_status(folder)
        if status and _is_supervised(status):
            _refuse_unmet(status.info)
            supervisor = None
        else:
            said("starting Temporal and Ray")
            supervisor = _spawn(_choose_info(folder, status), folder)
        try:
            info = _await_ready(folder, supervisor, said, deadline)
        except ServiceUnreachable:
            if supervisor is not None:
                stop_stack(folder)  # its supervisor would go on trying for ever
            raise
        if info is not None:
            return info


def stop_stack(folder: Path | None = None) -> bool:
    """Stop every service, gracefully first. False when nothing ran.

    Runs that were going on stay open in Temporal's database and go on at the next start.
    """
    folder = folder or state_dir()
    status = stack_status(folder)
    if status is None:
        return False
    ran = _is_supervised(status)
    if ran:
        os.kill(status.supervisor_pid, signal.SIGTERM)
        if not wait_dead(status.supervisor_pid, status.supervisor_create_time, STOP_TIMEOUT_S):
            os.kill(status.supervisor_pid, signal.SIGKILL)
        status = stack_status(folder) or status
    for process in status.processes:
        ran = ran or process.alive
        kill_session(process.pid, process.create_time)
    return ran


def _make_folder(folder: Path) -> None:
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the state folder {folder} cannot be made ({error.strerror}); "
            "set PERDURE_STATE_DIR to a writable folder"
        ) from error


def _choose_info(folder: Path, previous: StackStatus | None) -> StackInfo:
    """Wished addresses, else the previous stack's where they are still ours or free, else new."""
    wishes = _wishes()
    given = wishes.get(RAY_GIVEN)
    if given is not None:
        asyncio.run(require_listener(given))
    if previous and _reusable(previous) and not _unmet(wishes, previous.info):
        return previous.info.model_copy(update={"payload_key_ids": tuple(payload_keys().keys)})
    temporal = choose(wishes.get(TEMPORAL_WISH), TEMPORAL_PORT, TEMPORAL_WISH)
    ui = choose(wishes.get(UI_WISH), UI_PORT, UI_WISH, taken=(temporal,))
    if given is None:
        ray = choose(wishes.get(RAY_WISH), RAY_PORT, RAY_WISH, taken=(temporal, ui))
    return StackInfo(
        temporal_address=f"{LOOPBACK}:{temporal}",
        temporal_ui=f"http://{LOOPBACK}:{ui}",
        ray_address=given or f"{LOOPBACK}:{ray}",
        state_dir=str(folder),
        own_ray=given is None,
        payload_key_ids=tuple(payload_keys().keys),
    )


def _wishes() -> dict[str, str]:
    """What the environment asks of the stack, by variable; an empty one asks for nothing."""
    ray = RAY_GIVEN if os.environ.get(RAY_GIVEN) else RAY_WISH
    values = {name: os.environ.get(name, "") for name in (TEMPORAL_WISH, UI_WISH, ray)}
    return {name: value for name, value in values.items() if value}


def _unmet(wishes: dict[str, str], info: StackInfo) -> dict[str, str]:
    """Wishes that a stack does not fulfill -> what it has instead."""
    has = {
        TEMPORAL_WISH: info.temporal_address.rpartition(":")[2],
        UI_WISH: info.temporal_ui.rpartition(":")[2],
        RAY_WISH: info.ray_address.rpartition(":")[2],
        RAY_GIVEN: info.ray_address,
    }
    return {name: has[name] for name, wish in wishes.items() if wish != has[name]}


def _refuse_unmet(info: StackInfo) -> None:
    """Refuse to go on with a running stack that is not what the environment asks for."""
    wishes = _wishes()
    for name, has in _unmet(wishes, info).items():
        raise ConfigurationError(
            f"{name}={wishes[name]}, but the embedded stack runs already with {has}; end it with "
            "`perdure down`, or unset the variable"
        )
    mine = tuple(payload_keys().keys)
    if mine != info.payload_key_ids:
        here, there = (", ".join(ids) or "none" for ids in (mine, info.payload_key_ids))
        raise ConfigurationError(
            f"payload keys here: {here}; those of the embedded stack that runs: {there}. Its "
            "workers could not read this command's payloads: end it with `perdure down`, or set "
            f"{KEYS_FILE} as it was"
        )


def _reusable(previous: StackStatus) -> bool:
    """A live service holds its port for us; a dead one's port must be free again."""
    living = {process.name for process in previous.processes if process.alive}
    ports = {"temporal": previous.info.temporal_address}
    if previous.info.own_ray:
        ports["ray"] = previous.info.ray_address
    return (previous.info.own_ray or RAY_GIVEN in _wishes()) and all(
        name in living or is_free(int(address.rpartition(":")[2]))
        for name, address in ports.items()
    )


def _spawn(info: StackInfo, folder: Path) -> subprocess.Popen[bytes]:
    build_services(info, folder)  # a missing program is the caller's error, not a log line
    with (info.log_dir / "supervisor.log").open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "workers.local_stack.supervisor", info.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )


def _is_supervised(status: StackStatus) -> bool:
    return is_alive(status.supervisor_pid, status.supervisor_create_time)


def _once(notice: Callable[[str], None]) -> Callable[[str], None]:
    """``notice`` without repetitions of the last line."""
    last = ""

    def say(line: str) -> None:
        nonlocal last
        if line != last:
            notice(line)
        last = line

    return say


def _await_ready(
    folder: Path,
    supervisor: subprocess.Popen[bytes] | None,
    notice: Callable[[str], None],
    deadline: float,
) -> StackInfo | None:
    """Wait for the stack of ``supervisor``, or of the one that lives already.

    None when there is nothing to wait for any more: another supervisor was quicker than ours, or
    the one that lived has ended.
    """
    while time.monotonic() < deadline:
        status = stack_status(folder)
        ended = None if supervisor is None else supervisor.poll()
        if ended == 0:
            time.sleep(YIELD_S)  # the quicker one is about to say so in its status, or is stopping
            return None
        if ended is not None:
            log = folder / "logs" / "supervisor.log"
            raise ServiceUnreachable(f"the supervisor ended at once; {log} says:\n{tail(log)}")
        if supervisor is None and not (status and _is_supervised(status)):
            return None
        if status and (supervisor is None or status.supervisor_pid == supervisor.pid):
            if status.ready:
                return status.info
            if status.failing and status.num_ends >= FAILING_ENDS:
                raise ServiceUnreachable(f"the embedded stack does not start: {status.failing}")
            missing = {s.name for s in build_services(status.info, folder)} - {
                process.name for process in status.processes
            }
            notice(f"waiting for {', '.join(sorted(missing)) or 'the services'}")
        time.sleep(0.05)
    raise ServiceUnreachable(
        f"the embedded stack was not ready within {START_TIMEOUT_S:.0f} s; "
        f"its logs are under {folder / 'logs'}"
    )
