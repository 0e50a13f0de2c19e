"""The compose file, the Dockerfile and what they refer to, checked without an engine."""

import json
import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.envconfig import ClientConfig
from typer.testing import CliRunner

from activities.server import SEARCH_ATTRIBUTES
from models.metrics import METRICS
from workers.cli.app import app
from workers.serving import GRACEFUL_SHUTDOWN
from workers.tracking.prometheus_sink import gauge_name

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROFILES = {
    None: {
        "postgres", "temporal-schema", "temporal", "temporal-namespace", "temporal-ui", "control",
    },
    "gpu": {"ray", "gpu-worker"},
    "minio": {"minio-volume", "minio", "minio-bucket"},
    "metrics": {"prometheus", "grafana"},
}  # fmt: skip
JOBS = {"temporal-schema", "temporal-namespace", "minio-volume", "minio-bucket"}
OWN_IMAGES = {"perdure-control": "control", "perdure-gpu": "gpu"}
PACKAGES = ("models", "configs", "activities", "workflows", "workers")
SOURCE = "\n".join(path.read_text() for part in PACKAGES for path in (ROOT / part).rglob("*.py"))


def services(test: Any) -> Any:
    return pytest.mark.parametrize("name", sorted(SERVICES))(test)


def test_services_and_profiles() -> None:
    by_profile: dict[str | None, set[str]] = {}
    for name, service in SERVICES.items():
        for profile in service.get("profiles", [None]):
            by_profile.setdefault(profile, set()).add(name)
    assert by_profile == PROFILES


@services
def test_images_are_pinned(name: str) -> None:
    image, _, tag = SERVICES[name]["image"].partition(":")
    assert re.fullmatch(r"[a-z-]+(/[a-z-]+)?", image), "a public name of the default registry"
    assert re.search(r"\d+\.\d+|\d{4}-\d\d-\d\d", tag)
    if image in OWN_IMAGES:
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        assert (tag, SERVICES[name].get("build", {}).get("target", OWN_IMAGES[image])) == (
            version,
            OWN_IMAGES[image],
        )


@services
def test_ports_are_bound_to_loopback(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z_]+:-\d+\}:\d+", port), port


@services
def test_nothing_is_more_than_it_needs_to_be(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    if name == "minio-volume":  # changes the owner of a fresh volume, and nothing else
        assert (service["cap_add"], service["network_mode"]) == (["CHOWN"], "none")
    else:
        assert service.get("user") not in ("root", "0", "0:0")
        assert "cap_add" not in service


@services
def test_services_restart_and_tell_their_health(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == ("on-failure:5" if name in JOBS else "unless-stopped")
    assert ("healthcheck" in service) == (name not in JOBS)


@services
def test_dependencies_are_awaited_and_in_reach(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        finished = needed in JOBS
        condition = "service_completed_successfully" if finished else "service_healthy"
        assert how["condition"] == condition, (name, needed)
        mine = set(SERVICES[name].get("profiles", [None]))
        assert set(SERVICES[needed].get("profiles", [None])) <= mine | {None}


@services
def test_what_is_mounted_exists(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (ROOT / source).exists(), volume
            assert volume.endswith(":ro"), volume
        else:
            assert source in COMPOSE["volumes"]


def test_secrets_come_from_the_settings() -> None:
    made = dict(
        line.split("=")
        for line in subprocess.run(
            [ROOT / "deploy/make-env"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.splitlines()
    )
    text = (ROOT / "docker-compose.yml").read_text()
    assert set(re.findall(r"\$\{([A-Z_]+):\?", text)) == set(made)
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in made.values())
    assert len(set(made.values())) == len(made)
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD$|_PWD$|TOKEN$|_KEY$", variable):
                assert re.fullmatch(r"\$\{[A-Z_]+:\?[^}]+\}", value), (name, variable)


def test_the_guide_has_every_setting() -> None:
    guide = (ROOT / "docs/deployment.md").read_text()
    text = (ROOT / "docker-compose.yml").read_text()
    for setting in set(re.findall(r"\$\{([A-Z_]+)[:}]", text)) - {"MINIO_ROOT_USER"}:
        assert f"`{setting}`" in guide, setting
    for name, service in SERVICES.items():
        assert f"`{name}`" in guide
        for port in service.get("ports", []):
            default = re.search(r":-(\d+)\}", port)
            assert default is not None
            assert default.group(1) in guide


def test_secrets_stay_out_of_git_and_of_the_image() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {".env", "deploy/worker.env"} <= set(ignored)
    assert (ROOT / "deploy/secrets/.gitignore").read_text() == "*\n!.gitignore\n"
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"


@pytest.mark.parametrize("name", ["control", "gpu-worker"])
def test_worker_commands_and_variables_exist(name: str) -> None:
    service = SERVICES[name]
    assert CliRunner().invoke(app, [*service["command"], "--help"]).exit_code == 0
    for variable in service["environment"]:
        if variable.startswith("PERDURE_"):
            assert f'"{variable}"' in SOURCE, variable
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > GRACEFUL_SHUTDOWN.total_seconds()


def test_the_gpu_worker_lives_where_its_ray_node_lives() -> None:
    worker, ray = SERVICES["gpu-worker"], SERVICES["ray"]
    assert {worker[key] for key in ("network_mode", "pid", "ipc")} == {"service:ray"}
    assert worker["image"] == ray["image"]
    assert worker["volumes"] == ray["volumes"]
    folder = next(each for each in ray["entrypoint"] if each.startswith("--temp-dir="))
    assert f"ray-sessions:{folder.partition('=')[2]}" in ray["volumes"]
    port = next(each for each in ray["entrypoint"] if each.startswith("--port="))
    assert worker["environment"]["RAY_ADDRESS"] == f"127.0.0.1:{port.partition('=')[2]}"


def test_prometheus_asks_where_somebody_answers() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    asked = {
        target
        for job in config["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    }
    gpu = SERVICES["gpu-worker"]["environment"]
    port = {name: gpu[name].rpartition(":")[2] for name in gpu if name.endswith("METRICS_ADDRESS")}
    server = SERVICES["temporal"]["environment"]["PROMETHEUS_ENDPOINT"].rpartition(":")[2]
    assert asked == {
        f"temporal:{server}",
        f"control:{port['PERDURE_METRICS_ADDRESS']}",
        f"ray:{port['PERDURE_METRICS_ADDRESS']}",
        f"ray:{port['PERDURE_RUN_METRICS_ADDRESS']}",
    }


def test_the_dashboard_shows_declared_metrics() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/perdure.json").read_text())
    source = yaml.safe_load(
        (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["datasource"]["uid"] == source["uid"] for panel in panels)
    queries = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    declared = {gauge_name(metric.name) for metric in METRICS}
    shown = set(re.findall(r"\bperdure_\w+", queries))
    assert len(shown) > 10
    assert shown <= declared


def test_no_two_metrics_have_one_gauge() -> None:
    assert len({gauge_name(metric.name) for metric in METRICS}) == len(METRICS)


def test_the_namespace_job_registers_what_runs_are_listed_by() -> None:
    script = (ROOT / "deploy/temporal/namespace.sh").read_text()
    table = script.partition("<<ATTRIBUTES\n")[2].partition("ATTRIBUTES")[0]
    registered = dict(line.split() for line in table.splitlines())
    assert registered == {
        name: IndexedValueType.Name(kind).removeprefix("INDEXED_VALUE_TYPE_").title()
        for name, kind in SEARCH_ATTRIBUTES.items()
    }


def dockerfile_stages() -> dict[str, list[str]]:
    stages: dict[str, list[str]] = {}
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("FROM "):
            stages[line.split(" AS ")[1]] = current = [line]
        elif line and not line.startswith("#"):
            current.append(line)
    return stages


def test_the_images_install_declared_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "Dockerfile").read_text()
    extras = [each.split(",") for each in re.findall(r'"\.\[([a-z0-9,]+)\]"', text)]
    assert len(extras) == 2
    assert {name for names in extras for name in names} <= set(project["optional-dependencies"])
    assert "train" in extras[1], "the GPU image trains"
    assert "train" not in extras[0], "the control image needs no torch"
    python = re.search(r"FROM python:(\d+\.\d+)", text)
    assert python is not None
    assert f">={python.group(1)}" >= project["requires-python"]


def test_the_images_take_every_package_and_their_context_has_it() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    context = (ROOT / ".dockerignore").read_text()
    for stage in ("control-build", "gpu"):
        copied = " ".join(line for line in dockerfile_stages()[stage] if line.startswith("COPY"))
        for package in wheel["targets"]["wheel"]["packages"]:
            assert f"COPY {package} {package}" in copied
            assert f"!{package}\n" in context
        for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
            assert name in copied
            assert f"!{name}\n" in context
            assert (ROOT / name).is_file()


def test_the_sglang_of_the_image_is_one_that_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["sglang"]
    found = re.search(r"ARG SGLANG_VERSION=(\S+)", (ROOT / "Dockerfile").read_text())
    assert found is not None
    assert found.group(1) in Requirement(wanted).specifier


@pytest.mark.parametrize("stage", ["control", "gpu"])
def test_images_do_not_run_as_root(stage: str) -> None:
    lines = dockerfile_stages()[stage]
    assert [line for line in lines if line.startswith("USER")] == ["USER perdure"]
    command = json.loads(next(line for line in lines if line.startswith("CMD"))[4:])
    assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0
    assert lines[-2] == 'ENTRYPOINT ["perdure"]'


@pytest.mark.parametrize("script", ["deploy/temporal/schema.sh", "deploy/temporal/namespace.sh"])
def test_scripts_are_plain_shell(script: str) -> None:
    subprocess.run(["sh", "-n", ROOT / script], check=True, timeout=10)


def test_the_schema_job_makes_both_databases(tmp_path: Path) -> None:
    """A stand-in for temporal-sql-tool notes how it is called."""
    tool = tmp_path / "temporal-sql-tool"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    done = subprocess.run(
        ["sh", ROOT / "deploy/temporal/schema.sh"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    folder = "/etc/temporal/schema/postgresql/v12"
    assert done.stdout.splitlines() == [
        "--db temporal create-database",
        "--db temporal setup-schema --version 0.0",
        f"--db temporal update-schema --schema-dir {folder}/temporal/versioned",
        "--db temporal_visibility create-database",
        "--db temporal_visibility setup-schema --version 0.0",
        f"--db temporal_visibility update-schema --schema-dir {folder}/visibility/versioned",
    ]


@pytest.mark.parametrize(
    ("profile", "key", "tls"),
    [("default", "", False), ("tls", "", True), ("mtls", "", True), ("cloud", "k", True)],
)
def test_temporal_profiles_load(profile: str, key: str, tls: bool, tmp_path: Path) -> None:
    text = (ROOT / "deploy/temporal.toml.example").read_text()
    for name in ("ca.pem", "client.pem", "client.key"):
        (tmp_path / name).write_text("a certificate")
    (tmp_path / "temporal.toml").write_text(text.replace("/run/perdure", str(tmp_path)))
    config = ClientConfig.load_client_connect_config(
        profile=profile,
        config_file=str(tmp_path / "temporal.toml"),
        config_file_strict=True,
        override_env_vars={"TEMPORAL_API_KEY": key} if key else {},
    )
    assert config["target_host"].endswith(":7233")
    assert config["namespace"]
    assert config.get("api_key") == (key or None)
    # with an API key the client turns TLS on by itself
    assert bool(config.get("tls")) or bool(key) is tls


@pytest.mark.parametrize("profiles", [[], ["gpu"], ["minio"], ["metrics"], ["gpu", "metrics"]])
def test_the_client_takes_the_file(profiles: list[str], tmp_path: Path) -> None:
    client = compose_client()
    if client is None:
        pytest.skip("no docker compose client is installed")
    settings = tmp_path / "env"
    settings.write_text(subprocess.check_output([ROOT / "deploy/make-env"], text=True, timeout=10))
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    done = subprocess.run(
        [*client, "--env-file", settings, *chosen, "config", "--services"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    expected = PROFILES[None].union(*(PROFILES[profile] for profile in profiles))
    assert set(done.stdout.split()) == expected


def compose_client() -> list[str] | None:
    """``docker compose`` or ``docker-compose``; version 2 of either."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        asked = subprocess.run(
            [*command, "version", "--short"], capture_output=True, text=True, timeout=30
        )
        if asked.returncode == 0 and asked.stdout.strip().lstrip("v") >= "2.":
            return command
    return None
