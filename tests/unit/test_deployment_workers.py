"""What a deployed worker's environment asks for: addresses of metrics, a version, its health."""

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion

from models.errors import ConfigurationError
from models.ids import RunRef
from workers import alive
from workers.deployment import deployment
from workers.metrics_address import RUN_METRICS, WORKER_METRICS, metrics_address
from workers.tracking.prometheus_sink import PrometheusSink, gauge_name

RUN = RunRef(run_id="train/a", root="/nowhere", spec_sha256="0" * 64)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("variable", [WORKER_METRICS, RUN_METRICS])
def test_addresses_of_metrics(variable: str) -> None:
    assert metrics_address(variable, {}) is None
    assert metrics_address(variable, {variable: ""}) is None
    assert metrics_address(variable, {variable: "0.0.0.0:9464"}) == "0.0.0.0:9464"
    for wrong in ("9464", ":9464", "host", "host:0", "host:65536", "host:port"):
        with pytest.raises(ConfigurationError, match=f"{variable} is '{wrong}'; set it to host"):
            metrics_address(variable, {variable: wrong})


def test_a_deployment_version_needs_both_variables() -> None:
    assert deployment({}) is None
    assert deployment({"PERDURE_DEPLOYMENT": "", "PERDURE_BUILD_ID": ""}) is None
    config = deployment({"PERDURE_DEPLOYMENT": "perdure", "PERDURE_BUILD_ID": "0.1.0"})
    assert config is not None
    assert config.version == WorkerDeploymentVersion("perdure", "0.1.0")
    assert config.use_worker_versioning
    assert config.default_versioning_behavior is VersioningBehavior.AUTO_UPGRADE
    for half in ({"PERDURE_DEPLOYMENT": "perdure"}, {"PERDURE_BUILD_ID": "0.1.0"}):
        with pytest.raises(ConfigurationError, match="set both or neither"):
            deployment(half)


def test_health_is_whether_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert alive.main([address]) == 0
        monkeypatch.setenv(WORKER_METRICS, address)
        assert alive.main([]) == 0
    assert alive.main([address]) == 1
    monkeypatch.delenv(WORKER_METRICS)
    assert alive.main([]) == 1


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_prometheus_sees_the_newest_metrics_of_every_run() -> None:
    address = f"127.0.0.1:{free_port()}"
    sink = PrometheusSink(address)
    try:
        other = RUN.model_copy(update={"run_id": "train/b"})
        sink.log(RUN, {"train/loss": 1.5, "rollout/response_len/mean": 7.0})
        sink.log(RUN, {"train/loss": -0.25, "eval/tasks-truncated_ratio": 0.5})
        sink.log(other, {"train/loss": 2.0})
        with pytest.raises(ConfigurationError, match=f"cannot be served at {address}"):
            PrometheusSink(address)
    except BaseException:
        sink.close()
        raise
    deadline = time.monotonic() + 10
    while sink.counts.recorded < 3:
        assert time.monotonic() < deadline, sink.counts
        time.sleep(0.01)
    assert scrape(address) == {
        'perdure_train_loss{run="train/a"}': -0.25,
        'perdure_train_loss{run="train/b"}': 2.0,
        'perdure_rollout_response_len_mean{run="train/a"}': 7.0,
        'perdure_eval_tasks_truncated_ratio{run="train/a"}': 0.5,
    }
    assert sink.close()
    with pytest.raises(OSError, match="refused"):
        scrape(address)


def test_names_as_prometheus_spells_them() -> None:
    assert gauge_name("train/lr_used-pg_0") == "perdure_train_lr_used_pg_0"


def test_a_worker_says_that_its_metrics_cannot_be_served(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "workers", "worker", "control"],
            env={"PERDURE_METRICS_ADDRESS": f"127.0.0.1:{port}", "HOME": str(tmp_path)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=50,
        )
    assert done.returncode == 1
    assert f"metrics cannot be served at 127.0.0.1:{port}" in done.stderr
