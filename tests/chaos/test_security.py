"""A whole run on a stack of its own: what listens where, who is refused, where secrets end up."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from kill_harness import Stack, write_config

from workers.local_stack.state import ray_temp_dir

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

CANARY = "canary7Hq2xT9wZ"
SECRETS = {
    "HF_TOKEN": f"hf_{CANARY}",
    "WANDB_API_KEY": f"{CANARY}wandb",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}aws",
    "PERDURE_ENGINE_TOKEN": f"{CANARY}engine",
    "PERDURE_CODEC_TOKEN": f"{CANARY}codec",
    "HF_ENDPOINT": f"https://me:{CANARY}url@hub.invalid",
    "TEMPORAL_API_KEY": f"{CANARY}temporal",
}
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
DEADLINE_S = 150.0
RUN_S = 10.0
"""Of training: engines and router must still be there when they are asked."""
JOIN = """
import ray
ray.init(address={address!r}, log_to_driver=False)
print("joined", ray.cluster_resources())
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="perdure-secure-", dir="/tmp") as folder:
        stack = Stack(Path(folder))
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
            stack.env.pop(name, None)
        stack.env |= SECRETS
        stack.up()
        yield stack
        stack.down()


def processes_of(stack: Stack) -> list[psutil.Process]:
    """Everything that was started with the stack's folder in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PERDURE_STATE_DIR") == str(stack.folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def listeners(processes: list[psutil.Process]) -> dict[tuple[str, int], str]:
    """(address, port) -> name of the process that listens there."""
    found = {}
    for process in processes:
        try:
            for each in process.net_connections(kind="inet"):
                if each.status == psutil.CONN_LISTEN:
                    found[(each.laddr.ip, each.laddr.port)] = process.name()
        except psutil.NoSuchProcess:
            continue
    return found


def joined(address: str, **told: str) -> str:
    """What comes of joining the Ray cluster from a process that knows this much."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": "/nowhere", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **told}
    try:
        done = subprocess.run(
            [sys.executable, "-c", JOIN.format(address=address)],
            env=env, capture_output=True, text=True, timeout=40, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "no answer"
    return done.stdout + done.stderr


def holding(folder: Path, secrets: dict[str, str], spared: tuple[Path, ...] = ()) -> list[str]:
    """Files below ``folder`` that hold a secret, with its name."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path in spared or not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        found += [f"{path}: {name}" for name, value in secrets.items() if value.encode() in content]
    return found


def test_a_run_keeps_to_itself(stack: Stack, tmp_path: Path) -> None:
    model, root = tmp_path / "model", tmp_path / "root"
    made = stack.perdure(
        *("model", "tiny", "--out", str(model), "--letters", "3", "--hidden-size", "32"),
        *("--num-layers", "1", "--warmup-accuracy", "0.0"),
    )
    assert made.returncode == 0, made.stdout + made.stderr
    config = write_config(
        tmp_path / "run.toml", "secure", root, model,
        training__num_rollouts=100_000, training__rollout_batch_size=4,
        training__samples_per_prompt=4, training__global_batch_size=16,
        training__save_interval=100_000, evaluation__interval=100_000,
        async__fully_async=True, core__max_run_seconds=RUN_S,
    )  # fmt: skip
    started = stack.perdure("start", str(config))
    assert started.returncode == 0, started.stdout + started.stderr

    deadline = time.monotonic() + DEADLINE_S
    while not (root / "checkpoints" / "publication.jsonl").exists():
        assert time.monotonic() < deadline, "no publication"
        time.sleep(0.2)
    processes = processes_of(stack)
    found = listeners(processes)
    outside = {where: name for where, name in found.items() if where[0] not in LOOPBACK}
    assert len(found) > 8, found
    assert not outside, outside

    rows = json.loads((root / "fleet.json").read_text())
    servers = [row for row in rows if row.get("url")]
    assert {row["role"] for row in servers} == {"engine", "router"}
    for row in servers:
        for path in ("/abort_request", "/generate"):
            answer = httpx.post(f"{row['url']}{path}", json={"abort_all": True}, trust_env=False)
            assert answer.status_code == 401, (row["role"], path)

    status = json.loads((stack.folder / "stack.json").read_text())
    address, token_file = status["info"]["ray_address"], stack.folder / "ray.token"
    token = token_file.read_text()
    assert token_file.stat().st_mode & 0o077 == 0
    assert "joined" not in joined(address, RAY_AUTH_MODE="disabled")
    assert "joined" not in joined(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64)
    assert "joined" in joined(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)

    said = [
        stack.perdure("wait", "secure", "--json"),
        stack.perdure("status", str(root), "--verify", "--json"),
        stack.perdure("status", "secure", "--json"),
        stack.perdure("report", str(root)),
        stack.perdure("audit", str(root), "--json"),
        stack.perdure("config", "render", str(config)),
    ]
    assert [done.returncode for done in said] == [0] * len(said), [done.stderr for done in said]
    secrets = {**SECRETS, "the token of Ray": token}
    for done in said:
        for name, value in secrets.items():
            assert value not in done.stdout + done.stderr, name
    # The state folder holds every log and Temporal's database with all histories.
    assert (stack.folder / "temporal.db").stat().st_size > 0
    assert not holding(root, secrets)
    assert not holding(stack.folder, secrets, spared=(token_file,))
    assert not holding(ray_temp_dir(stack.folder), secrets)
    shown = [
        (process.pid, name)
        for process in processes
        if process.is_running()
        for name, value in secrets.items()
        if value in " ".join(process.cmdline())
    ]
    assert not shown, "arguments can be read by every account of the host"
