"""A Ray head of the session's own and tiny real runs on it."""

import asyncio
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from activities.storage import layout
from activities.storage.lease import Owner, claim_epoch
from activities.storage.store import Store
from configs.load import resolve_document
from models.ids import FenceToken, RunRef
from models.run import PrepareRequest
from workers.fleet import RayFleet

RAY_START_TIMEOUT_S = 60.0


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
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    # Ray's socket paths must stay below 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
    port = free_port()
    log = folder / "head.log"
    with log.open("wb") as stream:
        head = subprocess.Popen(
            [
                *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"),
                *("--port", str(port), "--num-cpus", "4", "--object-store-memory", "128000000"),
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


def tiny_document(root: Path, name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run that is prepared in a second: 1 layer, width 32, no warm-up."""
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": name,
        "model": {
            "source": "tiny",
            "tiny": {"hidden_size": 32, "num_layers": 1, "warmup_accuracy": 0.0},
        },
        "output": {"root": str(root)},
        "data": {
            "tasks": [
                {
                    "task": "reverse_word",
                    "train_count": 64,
                    "eval_count": 8,
                    "params": {"letters": 3},
                }
            ]
        },
        "training": {"num_rollouts": 8, "rollout_batch_size": 4, "samples_per_prompt": 2},
        "optimizer": {"learning_rate": 1e-3},
        "core": {"max_context_length": 64, "filter_zero_std_groups": False},
        "inference": {"dtype": "float32", "max_response_length": 5, "num_engines": 2},
    }
    for key, values in sections.items():
        document[key] = {**document.get(key, {}), **values}
    return document


class Run:
    """One run on disk, claimed; makes tokens and requests."""

    def __init__(self, root: Path, name: str, **sections: dict[str, Any]) -> None:
        loaded = resolve_document(tiny_document(root, name, **sections), origin="test")
        self.spec = loaded.spec
        self.store = Store(str(root))
        self.store.write_json(layout.RESOLVED_CONFIG, loaded.document)
        self.ref = RunRef(run_id=f"train/{name}", root=str(root), spec_sha256=loaded.sha256)
        self.epoch = self.claim()

    def claim(self) -> int:
        """Take the next epoch, as the start of a run or a rebuild does."""
        owner = Owner(run_id=self.ref.run_id, namespace="default", cluster_id="test")
        self.epoch = claim_epoch(self.store, owner)
        return self.epoch

    def token(self, update: int = 0, attempt: int = 1) -> FenceToken:
        return FenceToken(epoch=self.epoch, update=update, attempt=attempt)

    def request(self, **fields: Any) -> PrepareRequest:
        return PrepareRequest(run=self.ref, epoch=self.epoch, **fields)


@pytest.fixture(scope="session")
async def fleet(ray_address: str) -> AsyncIterator[RayFleet]:
    """The session's fleet; one driver in this process."""
    made = RayFleet(ray_address)
    await made.join()
    yield made
    await made.close()


@pytest.fixture
async def make_run(fleet: RayFleet, tmp_path: Path) -> AsyncIterator[Callable[..., Run]]:
    """Makes runs that are torn down after the test."""
    made: list[Run] = []

    def make(**sections: dict[str, Any]) -> Run:
        name = f"t{secrets.token_hex(4)}"
        made.append(Run(tmp_path / name, name, **sections))
        return made[-1]

    yield make
    for run in made:
        await fleet.teardown(run.ref)


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until ``condition`` holds; fails at the deadline."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
