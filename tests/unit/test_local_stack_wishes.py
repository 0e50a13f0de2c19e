"""What the environment asks of the embedded stack, without starting one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from temporalio.client import Client

from models.errors import ConfigurationError, ServiceUnreachable
from workers.cli.place import Place
from workers.cli.server import connect_to
from workers.connection import connect
from workers.local_stack import client
from workers.local_stack.client import ensure_stack, stack_status
from workers.local_stack.services import build_services, environment
from workers.local_stack.state import StackInfo, StackStatus, read_status, write_status
from workers.local_stack.supervisor import take_lock


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("PERDURE_TEMPORAL_PORT", "PERDURE_TEMPORAL_UI_PORT", "PERDURE_RAY_PORT"),
        *("RAY_ADDRESS", "RAY_AUTH_TOKEN"),
    ):
        monkeypatch.delenv(name, raising=False)


def info(folder: Path, *, own_ray: bool = True) -> StackInfo:
    return StackInfo(
        temporal_address="127.0.0.1:7001",
        temporal_ui="http://127.0.0.1:7002",
        ray_address="127.0.0.1:7003",
        state_dir=str(folder),
        own_ray=own_ray,
    )


@pytest.mark.parametrize(
    ("name", "value", "has"),
    [
        ("PERDURE_TEMPORAL_PORT", "7009", "7001"),
        ("PERDURE_TEMPORAL_PORT", "abc", "7001"),
        ("PERDURE_TEMPORAL_UI_PORT", "7009", "7002"),
        ("PERDURE_RAY_PORT", "7009", "7003"),
        ("RAY_ADDRESS", "10.0.0.1:6379", "127.0.0.1:7003"),
    ],
)
def test_a_running_stack_with_other_addresses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, has: str
) -> None:
    own = psutil.Process()
    running = StackStatus(
        info=info(tmp_path),
        supervisor_pid=own.pid,
        supervisor_create_time=own.create_time(),
        ready=True,
    )
    write_status(tmp_path, running)
    assert ensure_stack(tmp_path) == running.info
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"{name}={value}, .* runs already with {has}"):
        ensure_stack(tmp_path)
    monkeypatch.setenv(name, "")
    assert ensure_stack(tmp_path) == running.info


def test_the_slower_of_two_starts_joins_the_quicker_and_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quicker one's supervisor holds the lock and has not written its status yet."""
    quicker = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    created = psutil.Process(quicker.pid).create_time()
    started = StackStatus(
        info=info(tmp_path),
        supervisor_pid=quicker.pid,
        supervisor_create_time=created,
        ready=True,
    )
    lock = take_lock(tmp_path)
    assert lock is not None
    looks = iter([None, None, *[started] * 1000])  # before the spawn, beside it, then joined
    monkeypatch.setattr(client, "stack_status", lambda folder=None: next(looks))
    try:
        assert ensure_stack(tmp_path) == started.info
        assert quicker.poll() is None
    finally:
        lock.close()
        quicker.kill()
        quicker.wait()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto", "127.0.0.1:99999"])
def test_a_named_ray_cluster_that_does_not_answer_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ServiceUnreachable, match=address):
        ensure_stack(tmp_path)
    assert stack_status(tmp_path) is None
    assert os.listdir(tmp_path / "logs") == []


def test_a_wished_port_that_is_taken_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("PERDURE_RAY_PORT", str(listener.getsockname()[1]))
        with pytest.raises(ConfigurationError, match="PERDURE_RAY_PORT"):
            ensure_stack(tmp_path)
    assert stack_status(tmp_path) is None


def test_a_named_ray_cluster_is_used_with_its_own_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "theirs")
    given = info(tmp_path, own_ray=False)
    services = {service.name: service for service in build_services(given, tmp_path)}
    assert set(services) == {"temporal", "control", "gpu"}
    assert services["gpu"].needs == ("temporal",)
    assert services["gpu"].dies_with == ()
    variables = environment(given, tmp_path)
    assert variables["RAY_ADDRESS"] == "127.0.0.1:7003"
    assert variables["RAY_AUTH_TOKEN"] == "theirs"
    own = environment(info(tmp_path), tmp_path)
    assert own["RAY_AUTH_TOKEN"] != "theirs"


def test_a_state_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert read_status(file) is None
    with pytest.raises(ConfigurationError, match="PERDURE_STATE_DIR"):
        ensure_stack(file)


async def test_the_embedded_server_is_reached_without_the_keys_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user of Temporal has a profile; the embedded server has no such namespace and no TLS."""
    profile = tmp_path / "temporal.toml"
    profile.write_text('[profile.default]\nnamespace = "prod"\napi_key = "secret"\n')
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(profile))
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "prod")
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    given: list[dict[str, object]] = []

    async def connected(**options: object) -> None:
        given.append({name: options.get(name) for name in ("target_host", "namespace", "api_key")})

    monkeypatch.setattr(Client, "connect", connected)
    stack = info(tmp_path)
    await connect_to(Place(stack.temporal_address, stack=stack))
    await connect_to(Place(stack.temporal_address))
    variables = environment(stack, tmp_path)
    for name in [name for name in os.environ if name.startswith("TEMPORAL_")]:
        monkeypatch.delenv(name)
    for name in [name for name in variables if name.startswith("TEMPORAL_")]:
        monkeypatch.setenv(name, variables[name])
    await connect()
    plain = {"target_host": "127.0.0.1:7001", "namespace": None, "api_key": None}
    assert given == [plain, {**plain, "namespace": "prod", "api_key": "secret"}, plain]
