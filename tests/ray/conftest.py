"""A Ray head of the session's own, a fleet on it, and runs that end with their test."""

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fleet_rig import Run

from workers.fleet import RayFleet
from workers.sources.model import prepare_model

RAY_START_TIMEOUT_S = 50.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill_session(leader: int) -> None:
    """Every process of the head's session; Ray's workers have process groups of their own."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                process.kill()
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Address of a fresh Ray head on loopback."""
    # Ray's socket paths must stay below 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
    port = free_port()
    log = folder / "head.log"
    with log.open("wb") as stream:
        head = subprocess.Popen(
            [
                *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"),
                *("--port", str(port), "--num-cpus", "4", "--object-store-memory", "128000000"),
                *("--num-gpus", "4"),  # counted only: nothing computes there
                *("--include-dashboard=false", "--disable-usage-stats"),
                *("--temp-dir", str(folder / "r")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
    try:
        deadline = time.monotonic() + RAY_START_TIMEOUT_S
        while b"Ray runtime started" not in log.read_bytes():
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        kill_session(head.pid)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
async def fleet(ray_address: str) -> AsyncIterator[RayFleet]:
    """The session's fleet; one driver in this process."""
    made = RayFleet(ray_address)
    await made.join()
    yield made
    await made.close()


@pytest.fixture(scope="session")
async def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warmed-up tiny model that every run of the session starts from."""
    run = Run(tmp_path_factory.mktemp("model"), "model")
    prepared = await asyncio.to_thread(prepare_model, run.spec, run.store)
    return prepared.path


@pytest.fixture
async def make_unprepared_run(
    fleet: RayFleet, model_folder: Path, tmp_path: Path
) -> AsyncIterator[Callable[..., Run]]:
    """Makes runs that are torn down after the test."""
    made: list[Run] = []

    def make(**sections: dict[str, Any]) -> Run:
        name = f"t{secrets.token_hex(4)}"
        model = {"source": str(model_folder), "tiny": None}
        made.append(Run(tmp_path / name, name, **{"model": model, **sections}))
        return made[-1]

    yield make
    for run in made:
        await fleet.teardown(run.ref)


@pytest.fixture
def make_run(make_unprepared_run: Callable[..., Run]) -> Callable[..., Run]:
    """Makes runs whose model and data are there already, as at every later start."""

    def make(**sections: dict[str, Any]) -> Run:
        run = make_unprepared_run(**sections)
        run.prepare()
        return run

    return make
