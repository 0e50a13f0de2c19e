"""A Ray cluster of two nodes that share nothing but files and a cable: engines on the second one.

The head, the workers, the trainer and the producer are in one network namespace, the engines in the
other. ``poe nodes`` runs all of it, the loss of the second node included.
"""

import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest
from kill_harness import Job, Stack, account, until, write_config
from namespaces import Host, two_hosts, why_not

from workers.fleet.cluster import DRIVER_NAMESPACE
from workers.fleet.placement import group_name

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.workflow, pytest.mark.timeout(600)]

PORT = 6379
START_S = 120.0
LABEL = "role=engines"
ONE_NODE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set by who uses a cluster on loopback; such a cluster takes no second node."""
TINY = """[model.tiny]
hidden_size = 32
num_layers = 1
num_heads = 2
num_kv_heads = 1
warmup_accuracy = 0.0
"""
HOLD = """
import json, sys, ray
ray.init(
    address=sys.argv[1], namespace=sys.argv[4], log_to_driver=False, configure_logging=False
)
bundles = json.loads(sys.argv[3])
group = ray.util.placement_group(
    bundles, strategy="PACK", name=sys.argv[2], lifetime="detached",
    bundle_label_selector=[{"role": "engines"}] * len(bundles),
)
assert group.wait(60), "the second node has no room"
"""


class NodeStack(Stack):
    """An embedded stack without Ray, all of it on one host."""

    def __init__(self, folder: Path, host: Host, variables: dict[str, str]) -> None:
        super().__init__(folder)
        self.host = host
        self.env |= variables
        for name in ("PERDURE_RAY_PORT", ONE_NODE):
            self.env.pop(name, None)

    def inside(self, *command: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.host.inside, *command],
            env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def perdure(self, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return self.inside(sys.executable, "-m", "workers", *arguments, timeout_s=timeout_s)

    def hold_engines(self, run_id: str, bundles: list[dict[str, float]]) -> None:
        """The run finds the group of its engines made, on nodes with the label."""
        address, name = self.env["RAY_ADDRESS"], group_name(run_id, "engines")
        given = (address, name, json.dumps(bundles), DRIVER_NAMESPACE)
        done = self.inside(sys.executable, "-c", HOLD, *given)
        assert done.returncode == 0, done.stdout + done.stderr


class Node:
    """A Ray node on a host; may be started again after a kill."""

    def __init__(self, host: Host, folder: Path, options: list[str], env: dict[str, str]) -> None:
        self.host = host
        self._folder = folder
        self._options = options
        self._env = env
        self._lives: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        log = self._folder / f"{self.host.name}.{len(self._lives)}.log"
        with log.open("wb") as stream:
            node = self._launch(stream)
        self._lives.append(node)
        deadline = time.monotonic() + START_S
        while b"Ray runtime started" not in log.read_bytes():
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """Every process of the host, engines included."""
        self.host.kill()
        for node in self._lives:
            node.wait(START_S)

    def _launch(self, stream: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *self.host.inside,
                *(str(Path(sys.executable).parent / "ray"), "start", "--block"),
                *("--node-ip-address", self.host.address, "--num-cpus", "2"),
                *("--object-store-memory", "128000000", "--disable-usage-stats"),
                *self._options,
            ],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd="/",
        )


@contextmanager
def cluster() -> Iterator[tuple[NodeStack, Node]]:
    with ExitStack() as stack:
        # Ray's socket paths must stay below 108 characters.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pn-", dir="/tmp")))
        head, second = stack.enter_context(two_hosts())
        address = f"{head.address}:{PORT}"
        variables = {
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(24),
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        services = NodeStack(folder / "state", head, variables)
        joins = {key: value for key, value in services.env.items() if key != "RAY_ADDRESS"}
        first = ["--head", "--port", str(PORT), "--temp-dir", str(folder / "r")]
        main = Node(head, folder, [*first, "--include-dashboard=false"], joins)
        node = Node(second, folder, ["--address", address, "--labels", LABEL], joins)
        for each in (main, node):
            stack.callback(each.kill)
            each.start()
        services.up()
        stack.callback(services.perdure, "down")
        yield services, node


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[NodeStack, Node]]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with cluster() as made:
        yield made


def job_of(stack: NodeStack, folder: Path, name: str, updates: int) -> Job:
    config = write_config(
        folder / "run.toml",
        name,
        folder / "root",
        Path("tiny"),
        model__source="tiny",
        training__num_rollouts=updates,
        training__rollout_batch_size=4,
        training__samples_per_prompt=4,
        training__global_batch_size=16,
        training__save_interval=2,
        optimizer__lr_warmup_steps=2,
        evaluation__interval=1000,
    )
    config.write_text(config.read_text() + TINY)
    job = Job(stack, config, name, folder / "root")
    stack.hold_engines(job.run_id, [{"CPU": 0.05}])
    return job


def engine_host(job: Job) -> str:
    rows = json.loads((job.root / "fleet.json").read_text())
    (url,) = [row["url"] for row in rows if row["role"] == "engine"]
    return str(url).partition("://")[2].partition(":")[0]


def finish(job: Job, stack: NodeStack) -> None:
    done = stack.perdure("wait", job.run_id.removeprefix("train/"))
    assert done.returncode == 0, done.stdout + done.stderr
    books = account(job.root)
    assert (books.missing, books.doubled) == (0, 0)


async def test_engines_live_on_another_node(nodes: tuple[NodeStack, Node], tmp_path: Path) -> None:
    stack, node = nodes
    job = job_of(stack, tmp_path, "nodes", 3)
    await asyncio.to_thread(job.start)
    await asyncio.to_thread(finish, job, stack)
    assert engine_host(job) == node.host.address


@pytest.mark.chaos
async def test_a_lost_node_is_replaced_or_waited_for(
    nodes: tuple[NodeStack, Node], tmp_path: Path
) -> None:
    stack, node = nodes
    job = job_of(stack, tmp_path, "lost-node", 40)
    await asyncio.to_thread(job.start)
    await job.until_updates(3)
    await asyncio.to_thread(node.kill)
    lost_after = len(job.finished_updates())
    log = stack.folder / "logs" / "gpu.log"
    waiting = f"group={group_name(job.run_id, 'engines')} missing='needs 0.05 CPU"

    def waits_or_goes_on() -> bool:
        # one collection more may have been there
        return waiting in log.read_text() or len(job.finished_updates()) > lost_after + 2

    await until(waits_or_goes_on, START_S)
    await asyncio.to_thread(node.start)
    await asyncio.to_thread(finish, job, stack)
    assert len({row["update"] for row in job.finished_updates()}) == 40
