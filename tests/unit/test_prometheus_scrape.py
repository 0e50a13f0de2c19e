"""A real Prometheus reads what a GPU worker serves, by the configuration that is deployed."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.ids import RunRef
from workers.local_stack.ports import free_port
from workers.tracking.prometheus_sink import PrometheusSink

CONFIG = Path(__file__).parents[2] / "deploy/prometheus/prometheus.yml"
DEADLINE_S = 40.0

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="the program prometheus is not installed"
)


@pytest.fixture
def worker() -> Iterator[str]:
    """Address of a worker's endpoint with the metrics of one run."""
    address = f"127.0.0.1:{free_port()}"
    sink = PrometheusSink(address)
    run = RunRef(run_id="train/scraped", root="/r", spec_sha256="0")
    sink.log(run, {"train/grad_norm": 0.5, "train/completed_steps": 7.0})
    yield address
    sink.close()


@pytest.fixture
def prometheus(worker: str, tmp_path: Path) -> Iterator[str]:
    """URL of a Prometheus with the deployed configuration, its targets all at ``worker``."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] |= {"scrape_interval": "500ms", "scrape_timeout": "400ms"}
    for job in config["scrape_configs"]:
        job |= {"scrape_interval": "500ms", "scrape_timeout": "400ms"}
        for each in job["static_configs"]:
            each["targets"] = [worker]
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                *("prometheus", f"--config.file={path}", f"--web.listen-address={address}"),
                f"--storage.tsdb.path={tmp_path / 'data'}",
            ],
            stdout=log,
            stderr=log,
        )
    yield f"http://{address}"
    server.terminate()
    server.wait(DEADLINE_S)


def answers(url: str, query: str) -> list[dict[str, Any]]:
    address = f"{url}/api/v1/query?query={urllib.parse.quote(query)}"
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            result: list[dict[str, Any]] = json.load(response)["data"]["result"]
    except OSError:
        return []  # it is still starting
    return result


def test_metrics_of_a_run_arrive_under_its_name(prometheus: str) -> None:
    query = 'perdure_train_grad_norm{run="train/scraped"}'
    deadline = time.monotonic() + DEADLINE_S
    while not (found := answers(prometheus, query)):
        assert time.monotonic() < deadline, "nothing was scraped"
        time.sleep(0.1)
    assert {float(each["value"][1]) for each in found} == {0.5}
    steps = answers(prometheus, 'perdure_train_completed_steps{run="train/scraped"}')
    assert {float(each["value"][1]) for each in steps} == {7.0}
    assert {each["value"][1] for each in answers(prometheus, "up")} == {"1"}


def test_the_deployed_configuration_is_one() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("the program promtool is not installed")
    checked = subprocess.run(
        ["promtool", "check", "config", str(CONFIG)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
