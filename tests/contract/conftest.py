"""Served engines for the contract tests: real processes on a tiny random model.

``engine`` is the native engine. ``any_engine`` is each in turn: the native engine, and SGLang where
an environment has it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.engine_model import CONFIG, GPU_SIZES, write_engine_model
from tests.support.served_engine import DEADLINE_S, ServedEngine
from tests.support.sglang_server import (
    MAX_QUEUED,
    NO_SGLANG,
    sees_gpu,
    sglang_python,
    sglang_server,
)

SGLANG_START_S = 300
BFLOAT16_TOLERANCE = 0.3


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A served engine and the folders that it may load."""

    kind: str
    url: str
    folders: tuple[Path, Path]
    config: dict[str, Any]
    max_queued: int = 4
    tolerance: float = 1e-4
    dtype: torch.dtype = torch.float32


def start_engine(folder: Path, ready: Path, *extra: str) -> "subprocess.Popen[bytes]":
    arguments = ["--model-path", str(folder), "--dtype", "float32", "--ready-file", str(ready)]
    command = [sys.executable, "-m", "workers.engines.native", *arguments, *extra]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for_url(process: "subprocess.Popen[bytes]", ready: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not ready.exists():
        assert process.poll() is None, "the engine ended before it was ready"
        assert time.monotonic() < deadline, "the engine is not ready"
        time.sleep(0.02)
    return str(json.loads(ready.read_text())["url"])


@pytest.fixture(scope="session")
def native_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("engine")
    return write_engine_model(root / "v0", 0), write_engine_model(root / "v1", 1)


@pytest.fixture(scope="session")
def native_url(
    native_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    ready = tmp_path_factory.mktemp("ready") / "engine.json"
    limits = ("--max-running-requests", "4", "--max-queued-requests", "4", "--exit-with-parent")
    process = start_engine(native_folders[0], ready, *limits, "--enable-return-routed-experts")
    try:
        yield wait_for_url(process, ready)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


@pytest.fixture(scope="session")
def sglang_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    python = sglang_python()
    if python is None:
        pytest.skip(NO_SGLANG)
    root, on_gpu = tmp_path_factory.mktemp("sglang"), sees_gpu(python)
    sizes = GPU_SIZES if on_gpu else {}
    folders = (
        write_engine_model(root / "v0", 0, **sizes),
        write_engine_model(root / "v1", 1, **sizes),
    )
    tolerance, dtype = (BFLOAT16_TOLERANCE, torch.bfloat16) if on_gpu else (1e-4, torch.float32)
    config = CONFIG | sizes
    with sglang_server(folders[0], root) as url:
        yield EngineProcess("sglang", url, folders, config, MAX_QUEUED, tolerance, dtype)


@asynccontextmanager
async def client_of(served: EngineProcess) -> AsyncIterator[ServedEngine]:
    """The engine; afterwards it is idle, open and on its first weights again."""
    async with httpx.AsyncClient(
        base_url=served.url, timeout=DEADLINE_S, trust_env=False
    ) as client:
        made = ServedEngine(
            served.kind,
            client,
            served.folders,
            dict(served.config),
            served.max_queued,
            served.tolerance,
            served.dtype,
        )
        yield made
        await made.restore()


@pytest.fixture
async def engine(native_url: str, native_folders: tuple[Path, Path]) -> AsyncIterator[ServedEngine]:
    async with client_of(EngineProcess("native", native_url, native_folders, CONFIG)) as made:
        yield made


SGLANG_MARKS = (pytest.mark.sglang, pytest.mark.timeout(SGLANG_START_S))


@pytest.fixture(scope="session", params=["native", pytest.param("sglang", marks=SGLANG_MARKS)])
def any_process(request: pytest.FixtureRequest) -> EngineProcess:
    if request.param == "sglang":
        return request.getfixturevalue("sglang_process")  # type: ignore[no-any-return]
    url, folders = (request.getfixturevalue(f"native_{name}") for name in ("url", "folders"))
    return EngineProcess("native", url, folders, CONFIG)


@pytest.fixture
async def any_engine(any_process: EngineProcess) -> AsyncIterator[ServedEngine]:
    async with client_of(any_process) as made:
        yield made


@pytest.fixture
async def sglang_engine(sglang_process: EngineProcess) -> AsyncIterator[ServedEngine]:
    async with client_of(sglang_process) as made:
        yield made
