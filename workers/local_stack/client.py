"""What the command line does with the stack: ensure, look, stop."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from models.errors import ConfigurationError, ServiceUnreachable
from workers.local_stack.ports import LOOPBACK, TEMPORAL_PORT, UI_PORT, choose, is_free
from workers.local_stack.processes import is_alive, kill_session, tail, wait_dead
from workers.local_stack.services import build_services
from workers.local_stack.state import StackInfo, StackStatus, read_status, state_dir

START_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 45.0
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
        ConfigurationError: a program is missing, a wished port is taken, the folder is read-only.
        ServiceUnreachable: a service keeps ending, or is not ready within 150 s.
    """
    folder = folder or state_dir()
    _make_folder(folder)
    status = stack_status(folder)
    if not (status and is_alive(status.supervisor_pid, status.supervisor_create_time)):
        notice("starting Temporal and Ray")
        supervisor = _spawn(_choose_info(folder, status), folder)
    else:
        supervisor = None
    return _await_ready(folder, supervisor, notice)


def stop_stack(folder: Path | None = None) -> bool:
    """Stop every service, gracefully first. False when nothing ran.

    Runs that were going on stay open in Temporal's database and go on at the next start.
    """
    folder = folder or state_dir()
    status = stack_status(folder)
    if status is None:
        return False
    ran = is_alive(status.supervisor_pid, status.supervisor_create_time)
    if ran:
        os.kill(status.supervisor_pid, signal.SIGTERM)
        if not wait_dead(status.supervisor_pid, status.supervisor_create_time, STOP_TIMEOUT_S):
            os.kill(status.supervisor_pid, signal.SIGKILL)
    for process in status.processes:
        if is_alive(process.pid, process.create_time):
            ran = True
            kill_session(process.pid)
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
    """The ports of the previous stack where they are still ours or free, else chosen anew."""
    wanted = os.environ.get("PERDURE_TEMPORAL_PORT")
    wanted_ui = os.environ.get("PERDURE_TEMPORAL_UI_PORT")
    if previous and wanted is None and wanted_ui is None and _reusable(previous):
        return previous.info
    temporal = choose(wanted, TEMPORAL_PORT, "PERDURE_TEMPORAL_PORT")
    ui = choose(wanted_ui, UI_PORT, "PERDURE_TEMPORAL_UI_PORT")
    ray = choose(os.environ.get("PERDURE_RAY_PORT"), 6379, "PERDURE_RAY_PORT")
    return StackInfo(
        temporal_address=f"{LOOPBACK}:{temporal}",
        temporal_ui=f"http://{LOOPBACK}:{ui}",
        ray_address=f"{LOOPBACK}:{ray}",
        state_dir=str(folder),
    )


def _reusable(previous: StackStatus) -> bool:
    """A live service holds its port for us; a dead one's port must be free again."""
    living = {process.name for process in previous.processes if process.alive}
    ports = {
        "temporal": previous.info.temporal_address,
        "ray": previous.info.ray_address,
    }
    return all(
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


def _await_ready(
    folder: Path, supervisor: subprocess.Popen[bytes] | None, notice: Callable[[str], None]
) -> StackInfo:
    deadline = time.monotonic() + START_TIMEOUT_S
    said = ""
    while time.monotonic() < deadline:
        status = stack_status(folder)
        fresh = status is not None and (
            supervisor is None or status.supervisor_pid == supervisor.pid
        )
        if status and fresh:
            if status.ready:
                return status.info
            if status.failing and status.num_ends >= FAILING_ENDS:
                raise ServiceUnreachable(f"the embedded stack does not start: {status.failing}")
            missing = {"temporal", "ray", "control", "gpu"} - {p.name for p in status.processes}
            line = f"waiting for {', '.join(sorted(missing)) or 'the services'}"
            if line != said:
                notice(line)
                said = line
        elif supervisor is not None and supervisor.poll() not in (None, 0):
            log = folder / "logs" / "supervisor.log"
            raise ServiceUnreachable(f"the supervisor ended at once; {log} says:\n{tail(log)}")
        time.sleep(0.05)
    raise ServiceUnreachable(
        f"the embedded stack was not ready within {START_TIMEOUT_S:.0f} s; "
        f"its logs are under {folder / 'logs'}"
    )
