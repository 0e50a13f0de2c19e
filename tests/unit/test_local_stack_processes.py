"""Supervised processes: real ones, started, adopted, killed with their session."""

import asyncio
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from models.errors import ConfigurationError
from workers.local_stack import ports
from workers.local_stack.ports import choose, free_port, is_free
from workers.local_stack.processes import Child, is_alive, kill_session, tail, wait_dead
from workers.local_stack.services import Service
from workers.local_stack.state import (
    ProcessStatus,
    StackInfo,
    StackStatus,
    make_private,
    ray_temp_dir,
    read_status,
    write_status,
)
from workers.local_stack.supervisor import Supervisor, take_lock

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")
PARENT = (
    sys.executable,
    "-c",
    "import subprocess, sys, time;"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print(child.pid, flush=True); time.sleep(600)",
)


def _info(folder: Path) -> StackInfo:
    (folder / "logs").mkdir(exist_ok=True)
    return StackInfo(
        temporal_address="127.0.0.1:1",
        temporal_ui="http://127.0.0.1:2",
        ray_address="127.0.0.1:3",
        state_dir=str(folder),
    )


async def _until(condition, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_wait_reports_the_signal(tmp_path: Path) -> None:
    child = Child.start("s", SLEEPER, dict(os.environ), tmp_path / "s.log")
    assert is_alive(child.pid, child.create_time)
    os.kill(child.pid, signal.SIGKILL)
    assert await asyncio.wait_for(child.wait(), 10) == "signal SIGKILL"
    assert not is_alive(child.pid, child.create_time)


async def test_adopted_process_is_waited_for(tmp_path: Path) -> None:
    ours = Child.start("s", SLEEPER, dict(os.environ), tmp_path / "s.log")
    status = ProcessStatus(name="s", pid=ours.pid, create_time=ours.create_time)
    adopted = Child.adopt(status)
    assert adopted is not None
    waiting = asyncio.create_task(adopted.wait())
    os.kill(ours.pid, signal.SIGKILL)
    assert await asyncio.wait_for(waiting, 10) == "ended"
    await ours.wait()
    assert Child.adopt(status) is None


def test_a_reused_pid_is_not_adopted() -> None:
    own = psutil.Process()
    status = ProcessStatus(name="s", pid=own.pid, create_time=own.create_time() - 1000)
    assert Child.adopt(status) is None


async def test_a_session_of_somebody_else_is_not_killed(tmp_path: Path) -> None:
    """A pid on file from before a reboot may lead another session now."""
    other = Child.start("other", SLEEPER, dict(os.environ), tmp_path / "other.log")
    kill_session(other.pid, other.create_time - 1000)
    supervisor = Supervisor(_info(tmp_path), tmp_path, ())
    supervisor._adopt(
        ProcessStatus(name="ray", pid=other.pid, create_time=other.create_time - 1000)
    )
    assert is_alive(other.pid, other.create_time)
    await other.stop(grace_s=5)


async def test_what_a_dead_leader_left_is_killed_unless_it_is_of_an_earlier_boot(
    tmp_path: Path,
) -> None:
    log = tmp_path / "p.log"
    leader = Child.start("p", PARENT, dict(os.environ), log)
    await _until(lambda: log.read_text().strip().isdigit())
    left = psutil.Process(int(log.read_text()))
    created = left.create_time()
    os.kill(leader.pid, signal.SIGKILL)
    await asyncio.wait_for(leader.wait(), 10)
    kill_session(leader.pid, psutil.boot_time() - 1000)
    assert is_alive(left.pid, created)
    kill_session(leader.pid, leader.create_time)
    assert wait_dead(left.pid, created, 10)


async def test_stop_ends_grandchildren_too(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    child = Child.start("p", PARENT, dict(os.environ), log)
    await _until(lambda: log.read_text().strip().isdigit())
    grandchild = psutil.Process(int(log.read_text()))
    created = grandchild.create_time()
    await child.stop(grace_s=5)
    assert wait_dead(grandchild.pid, created, 10)


def test_tail_returns_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("\n".join(str(i) for i in range(100)))
    assert tail(path, 3) == "97\n98\n99"
    assert tail(tmp_path / "missing.log") == ""


def test_a_wished_port_that_is_taken_is_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(ConfigurationError, match=f"PERDURE_TEMPORAL_PORT={port}"):
            choose(str(port), 7233, "PERDURE_TEMPORAL_PORT")
        assert choose(None, port, "PERDURE_TEMPORAL_PORT") != port


@pytest.mark.parametrize("wish", ["", "x", "0", "70000", "-1"])
def test_a_wish_that_is_no_port_is_refused(wish: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a port number"):
        choose(wish, 7233, "PERDURE_TEMPORAL_PORT")


def test_a_free_port_is_none_of_ray_s_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setattr(ports, "RAY_WORKER_PORTS", range(first, first + 20_000))
    assert free_port() not in ports.RAY_WORKER_PORTS


def test_two_services_never_share_a_port() -> None:
    port = free_port()
    assert choose(None, port, "PERDURE_RAY_PORT") == port
    assert choose(None, port, "PERDURE_RAY_PORT", taken=(port,)) != port
    with pytest.raises(ConfigurationError, match=f"PERDURE_RAY_PORT={port}: the stack listens"):
        choose(str(port), 6379, "PERDURE_RAY_PORT", taken=(port,))


async def test_supervisor_restarts_and_binds_services(tmp_path: Path) -> None:
    port = free_port()
    server = (
        sys.executable,
        "-c",
        f"import socket,time; s=socket.socket(); s.setsockopt(1,2,1); s.bind(('127.0.0.1',{port}));"
        "s.listen(); time.sleep(600)",
    )
    services = (
        Service("base", server, port=port),
        Service("user", SLEEPER, needs=("base",), dies_with=("base",)),
    )
    supervisor = Supervisor(_info(tmp_path), tmp_path, services)
    running = asyncio.create_task(supervisor.run())
    await _until(lambda: (s := read_status(tmp_path)) is not None and s.ready)
    before = {p.name: p.pid for p in _status(tmp_path).processes}
    os.kill(before["base"], signal.SIGKILL)
    await _until(
        lambda: _status(tmp_path).ready and before["base"] not in _pids(_status(tmp_path)).values()
    )
    await _until(lambda: _pids(_status(tmp_path)).get("user") not in (None, before["user"]))
    assert "SIGKILL" in {p.name: p.last_exit for p in _status(tmp_path).processes}["base"]
    after = _status(tmp_path).processes
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 20)
    assert all(wait_dead(p.pid, p.create_time, 5) for p in after)


async def test_services_are_stopped_even_when_the_state_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    supervisor = Supervisor(_info(folder), folder, (Service("only", SLEEPER),))
    running = asyncio.create_task(supervisor.run())
    await _until(lambda: (s := read_status(folder)) is not None and s.ready)
    (service,) = _status(folder).processes
    shutil.rmtree(folder)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 20)
    assert wait_dead(service.pid, service.create_time, 5)


async def test_a_new_supervisor_adopts_what_lives(tmp_path: Path) -> None:
    services = (Service("only", SLEEPER),)
    first = Supervisor(_info(tmp_path), tmp_path, services)
    running = asyncio.create_task(first.run())
    await _until(lambda: (s := read_status(tmp_path)) is not None and s.ready)
    pid = _pids(_status(tmp_path))["only"]
    running.cancel()  # as a SIGKILL would leave it: nothing stopped
    await asyncio.gather(running, return_exceptions=True)
    second = Supervisor(_info(tmp_path), tmp_path, services)
    running = asyncio.create_task(second.run())
    await asyncio.sleep(0)
    await _until(lambda: _status(tmp_path).ready)
    assert _pids(_status(tmp_path)) == {"only": pid}
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 20)
    await first._children["only"].wait()  # its parent is this process, so it reaps it
    await asyncio.gather(*(child.wait() for child in first._children.values()))


async def test_a_supervisor_of_other_addresses_ends_what_lives(tmp_path: Path) -> None:
    """Services that listen elsewhere, or that it does not run, would never be found."""
    log = tmp_path / "x.log"
    lived = [Child.start(name, SLEEPER, dict(os.environ), log) for name in ("only", "ray")]
    before = StackStatus(
        info=_info(tmp_path),
        supervisor_pid=1,
        supervisor_create_time=0.0,
        processes=tuple(
            ProcessStatus(name=each.name, pid=each.pid, create_time=each.create_time)
            for each in lived
        ),
    )
    write_status(tmp_path, before)
    moved = before.info.model_copy(update={"ray_address": "10.0.0.1:6379", "own_ray": False})
    supervisor = Supervisor(moved, tmp_path, (Service("only", SLEEPER),))
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(asyncio.gather(*(each.wait() for each in lived)), 20)
    await _until(lambda: _status(tmp_path).info == moved and _status(tmp_path).ready)
    assert _pids(_status(tmp_path))["only"] != lived[0].pid
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 20)


async def test_a_service_is_restarted_though_the_log_folder_is_gone(tmp_path: Path) -> None:
    supervisor = Supervisor(_info(tmp_path), tmp_path, (Service("only", SLEEPER),))
    running = asyncio.create_task(supervisor.run())
    await _until(lambda: (s := read_status(tmp_path)) is not None and s.ready)
    pid = _pids(_status(tmp_path))["only"]
    shutil.rmtree(tmp_path / "logs")
    os.kill(pid, signal.SIGKILL)
    await _until(lambda: _pids(_status(tmp_path)).get("only") not in (None, pid))
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 20)


async def test_a_supervisor_that_stops_is_not_ready(tmp_path: Path) -> None:
    supervisor = Supervisor(_info(tmp_path), tmp_path, (Service("only", SLEEPER),))
    running = asyncio.create_task(supervisor.run())
    await _until(lambda: (s := read_status(tmp_path)) is not None and s.ready)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 20)
    assert not _status(tmp_path).ready


def test_the_folder_of_ray_is_private(tmp_path: Path) -> None:
    open_to_all = tmp_path / "left"
    open_to_all.mkdir(mode=0o777)
    for folder in (open_to_all, tmp_path / "new"):
        make_private(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(open_to_all)
    with pytest.raises(ConfigurationError, match="link"):
        make_private(tmp_path / "link")


def test_the_address_of_a_socket_of_ray_is_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**32 - 2)
    session = "session_2026-11-29_23-53-08_588543_4194304"
    assert len(str(ray_temp_dir(Path("/x")) / session / "sockets" / "plasma_store")) <= 107


def test_one_supervisor_a_folder(tmp_path: Path) -> None:
    first = take_lock(tmp_path)
    assert first is not None
    assert take_lock(tmp_path) is None
    first.close()
    second = take_lock(tmp_path)
    assert second is not None
    second.close()


def _status(folder: Path) -> StackStatus:
    status = read_status(folder)
    assert status is not None
    return status


def _pids(status: StackStatus) -> dict[str, int]:
    return {process.name: process.pid for process in status.processes}
