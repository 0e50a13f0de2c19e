"""Kill real processes of a real run and measure what comes after.

The harness starts an embedded stack in a folder of its own, runs a small job on it, kills a victim
at a chosen moment and reads the verdict from the run's artifacts alone.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.contrib.pydantic import pydantic_data_converter

from activities.analysis.audit import audit
from activities.analysis.lives import Fate
from activities.storage import layout
from workers.local_stack import stack_status, stop_stack
from workers.local_stack.ports import free_port

ACTORS = ("trainer", "producer", "engine", "router")
SERVICES = ("control", "gpu", "temporal", "ray")
VICTIMS = ("control", "gpu", "trainer", "engine", "producer", "temporal", "all")


class Stack:
    """An embedded stack under ``folder``, started and stopped through the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "PERDURE_STATE_DIR": str(folder),
            "PERDURE_TEMPORAL_PORT": str(free_port()),
            "PERDURE_TEMPORAL_UI_PORT": str(free_port()),
            "PERDURE_RAY_PORT": str(free_port()),
        }
        for name in ("TEMPORAL_ADDRESS", "RAY_ADDRESS"):
            self.env.pop(name, None)

    def perdure(self, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Run one command; its output is captured."""
        return subprocess.run(
            [sys.executable, "-m", "workers", *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def up(self) -> None:
        """Start, or start again after a kill of everything; the ports stay."""
        done = self.perdure("up")
        assert done.returncode == 0, done.stdout + done.stderr
        for name in ("PERDURE_TEMPORAL_PORT", "PERDURE_TEMPORAL_UI_PORT", "PERDURE_RAY_PORT"):
            self.env.pop(name, None)

    def down(self) -> None:
        """Stop everything that this stack started."""
        stop_stack(self.folder)

    def pids(self) -> dict[str, int]:
        """Service name -> pid, the supervisor included."""
        status = stack_status(self.folder)
        assert status is not None
        return {"supervisor": status.supervisor_pid} | {p.name: p.pid for p in status.processes}

    async def client(self) -> Client:
        """A Temporal client of this stack."""
        status = stack_status(self.folder)
        assert status is not None
        return await Client.connect(
            status.info.temporal_address, data_converter=pydantic_data_converter
        )


@dataclass
class Recovery:
    """What one kill did."""

    victim: str
    moment: str
    seconds: float
    """From the kill (for the Temporal server: from its restart) to the next finished update."""


class Job:
    """One run on the stack."""

    def __init__(self, stack: Stack, config: Path, name: str, root: Path) -> None:
        self.stack = stack
        self.config = config
        self.run_id = f"train/{name}"
        self.root = root

    def start(self) -> None:
        """Start without following."""
        done = self.stack.perdure("start", str(self.config))
        assert done.returncode == 0, done.stdout + done.stderr

    async def stage(self) -> str:
        """What the workflow awaits now."""
        client = await self.stack.client()
        progress = await client.get_workflow_handle(self.run_id).query(
            "progress", rpc_timeout=timedelta(seconds=5)
        )
        return str(progress["stage"])

    async def until_stage(self, prefixes: tuple[str, ...], timeout_s: float = 120) -> str:
        """Wait until the workflow awaits a stage that starts with one of ``prefixes``."""
        client = await self.stack.client()
        handle = client.get_workflow_handle(self.run_id)
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(Exception):
                    progress = await handle.query("progress", rpc_timeout=timedelta(seconds=2))
                    if str(progress["stage"]).startswith(prefixes):
                        return str(progress["stage"])
                await asyncio.sleep(0.01)

    def finished_updates(self) -> list[dict[str, object]]:
        """Rows of ``updates.jsonl``, in the order in which updates finished."""
        path = self.root / layout.UPDATES
        if not path.exists():
            return []
        rows = []
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows

    async def until_updates(self, count: int, timeout_s: float = 180) -> None:
        """Wait until ``updates.jsonl`` holds at least ``count`` rows."""
        await until(lambda: len(self.finished_updates()) >= count, timeout_s)

    async def until_closed(self, timeout_s: float = 400) -> WorkflowExecutionStatus:
        """Wait for the end of the workflow."""
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(Exception):
                    client = await self.stack.client()
                    description = await client.get_workflow_handle(self.run_id).describe()
                    if description.status not in (
                        WorkflowExecutionStatus.RUNNING,
                        WorkflowExecutionStatus.CONTINUED_AS_NEW,
                    ):
                        assert description.status is not None
                        return description.status
                await asyncio.sleep(0.2)

    def actor_pids(self, role: str) -> list[int]:
        """Pids of a role's actors (of the server process for an engine), from ``fleet.json``."""
        rows = json.loads((self.root / "fleet.json").read_text())
        rows = rows["actors"] if isinstance(rows, dict) else rows
        return [int(row["pid"]) for row in rows if row["role"] == role]

    def kill(self, victim: str) -> None:
        """SIGKILL the victim; ``all`` is every process of the stack and of the fleet."""
        pids = self.stack.pids()
        if victim == "all":
            targets = [*pids.values(), *(pid for role in ACTORS for pid in self.actor_pids(role))]
        elif victim in ACTORS:
            targets = self.actor_pids(victim)[:1]
        else:
            targets = [pids[victim]]
        for pid in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def kill_and_measure(self, victim: str, moment: str) -> Recovery:
        """Kill at the moment, bring the stack up again if all died, wait for the next update.

        ``moment`` is ``update``, ``training``, ``publication``, ``checkpoint``, ``evaluation``, or
        ``any`` for at once.
        """
        prefixes = {
            "update": ("optimize", "collect"),
            "training": ("optimize",),
            "publication": ("publish",),
            "checkpoint": ("checkpoint",),
            "evaluation": ("evaluate",),
            "any": (),
        }[moment]
        if prefixes:
            await self.until_stage(prefixes)
        before = len(self.finished_updates())
        old = self.stack.pids()
        self.kill(victim)
        started = time.monotonic()
        if victim == "all":
            self.stack.up()
        if victim == "temporal":
            await until(
                lambda: self.stack.pids().get("temporal") not in (None, old["temporal"]), 60
            )
            started = time.monotonic()
        await self.until_updates(before + 1)
        seconds = time.monotonic() - started
        return Recovery(victim, moment, seconds)

    def updates_redone(self) -> int:
        """Updates that were done again so far, after a rewind to a checkpoint."""
        indices = [int(str(row["update"])) for row in self.finished_updates()]
        return len(indices) - len(set(indices))


@dataclass
class Accounting:
    """Prompt accounting of a run from its artifacts alone."""

    trained: list[tuple[int, str, int]]
    """(group_index, prepared_sample_id, epoch_id) in the order of training."""
    missing: int
    doubled: int
    """Prompts trained and updates applied more than once."""
    updates: list[int]
    verdict: str


def account(root: Path) -> Accounting:
    """What ``perdure audit`` says of the root."""
    books = audit(str(root))
    return Accounting(
        trained=[tuple(each) for each in books.trained],
        missing=books.count(Fate.MISSING),
        doubled=books.prompts_doubled + books.updates_doubled,
        updates=list(range(books.updates)),
        verdict=books.verdict,
    )


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll a condition on other processes' files."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(psutil.Process(pid).memory_info().rss)


def write_config(path: Path, name: str, root: Path, model: Path, **settings: object) -> Path:
    """A tiny-ci-like run file on an existing warmed-up model folder.

    ``settings`` overrides ``section__key``; values are written as TOML by ``json.dumps``.
    """
    document: dict[str, dict[str, object]] = {
        "model": {"source": str(model)},
        "output": {"root": str(root), "export_hf": False},
        "training": {
            "num_rollouts": 24,
            "rollout_batch_size": 16,
            "samples_per_prompt": 8,
            "global_batch_size": 64,
            "loss_aggregation": "token",
            "save_interval": 6,
        },
        "optimizer": {"learning_rate": 1e-3, "lr_warmup_steps": 9, "lr_warmup_init": 1e-4},
        "core": {
            "max_policy_lag": 1,
            "filter_zero_std_groups": False,
            "max_context_length": 64,
        },
        "trainer": {"compute_dtype": "float32", "num_threads": 1},
        "inference": {
            "dtype": "float32",
            "max_response_length": 5,
            "max_running_requests": 128,
            "server_concurrency": 128,
            "num_threads": 1,
            "deterministic": True,
        },
        "evaluation": {"interval": 6, "initial": False},
        "async": {},
        "placement": {},
        "tracking": {"wandb_mode": "disabled"},
    }
    for key, value in settings.items():
        section, _, field = key.partition("__")
        document[section][field] = value
    lines = ["schema_version = 1", f'name = "{name}"']
    for section, fields in document.items():
        lines.append(f"[{section}]")
        lines += [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
    lines += [
        "[[data.tasks]]",
        'task = "reverse_word"',
        "train_count = 2000",
        "eval_count = 64",
        "params = { letters = 3 }",
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
