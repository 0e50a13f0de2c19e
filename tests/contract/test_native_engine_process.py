"""The life of the engine process: start, refusals to start, signals, a parent that dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file

from workers.engines.native.model_shape import read_model_shape
from workers.engines.native.weights import WeightStore

DEADLINE_S = 50.0
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 100_000,
    "tie_word_embeddings": True,
}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    store = WeightStore(read_model_shape(folder), torch.float32)
    tensors = {name: torch.randn(view.shape) * 0.1 for name, view in store.named.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def command(folder: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "workers.engines.native", "--model-path", str(folder), *extra]


@contextmanager
def engine(
    folder: Path, ready: Path, *extra: str, **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    told = command(folder, "--ready-file", str(ready), *extra)
    process = subprocess.Popen(told, env=ENVIRONMENT | environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)


def wait_for_ready(ready: Path) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while not ready.exists():
        assert time.monotonic() < deadline, "the engine is not ready"
        time.sleep(0.02)
    return dict(json.loads(ready.read_text()))


def refusal(*arguments: str, folder: Path, **environment: str) -> str:
    """Stderr of an engine that refuses to start with status 2."""
    done = subprocess.run(
        command(folder, *arguments), env=ENVIRONMENT | environment, capture_output=True,
        timeout=DEADLINE_S, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_refusals_to_start(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json does not exist" in refusal(folder=empty)
    (empty / "config.json").write_text(json.dumps(CONFIG))
    assert "has no weights" in refusal(folder=empty)
    (empty / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    assert "llama, mistral, olmoe, qwen2, qwen3, qwen3_moe" in refusal(folder=empty)
    (empty / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 32}))
    save_file({"model.norm.weight": torch.ones(16)}, empty / "model.safetensors")
    assert "the tensors do not fit llama" in refusal(folder=empty)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        message = refusal("--port", port, folder=folder)
    assert message == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use"


def test_ready_file_tells_where_it_serves(folder: Path, tmp_path: Path) -> None:
    with engine(folder, tmp_path / "ready.json", "--weight-version", "7") as process:
        told = wait_for_ready(tmp_path / "ready.json")
        assert told["pid"] == process.pid
        assert told["url"] == f"http://127.0.0.1:{told['port']}"
        assert httpx.get(told["url"] + "/health").status_code == 200
        assert httpx.get(told["url"] + "/model_info").json()["weight_version"] == "7"
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ready.json"]


def test_sigterm_answers_running_requests_within_the_bound(folder: Path, tmp_path: Path) -> None:
    with engine(folder, tmp_path / "ready", "--shutdown-timeout", "0.5") as process:
        url = wait_for_ready(tmp_path / "ready")["url"]
        sampling = {"max_new_tokens": 90_000, "ignore_eos": True}
        call = {"input_ids": [5, 6], "sampling_params": sampling, "stream": True}
        with httpx.stream("POST", f"{url}/generate", json=call, timeout=DEADLINE_S) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            process.send_signal(signal.SIGTERM)
            last = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"][-1]
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < last["meta_info"]["completion_tokens"] < 90_000
        assert process.wait(DEADLINE_S) == 0


DELAY = "PERDURE_ENGINE_STEP_DELAY_MS"


@pytest.mark.parametrize("value", ["fast", "", "-1", "nan", "inf"])
def test_a_step_delay_that_is_none_is_refused(folder: Path, value: str) -> None:
    message = refusal(folder=folder, **{DELAY: value})
    assert message.startswith(f"error: {DELAY}={value!r} is no number of milliseconds")


def test_a_step_delay_lengthens_every_step_without_work(folder: Path, tmp_path: Path) -> None:
    with engine(folder, tmp_path / "ready", **{DELAY: "50"}) as process:
        url = wait_for_ready(tmp_path / "ready")["url"]
        sampling = {"max_new_tokens": 20, "ignore_eos": True}
        used = psutil.Process(process.pid).cpu_times()
        started = time.monotonic()
        # three prompts decode together: 20 steps, not 60
        prompts = {"input_ids": [[5, 6], [7, 8], [9]], "sampling_params": sampling}
        bodies = httpx.post(f"{url}/generate", json=prompts, timeout=DEADLINE_S).json()
        seconds = time.monotonic() - started
        now = psutil.Process(process.pid).cpu_times()
        assert [body["meta_info"]["completion_tokens"] for body in bodies] == [20] * 3
        assert seconds >= 20 * 0.05
        assert now.user + now.system - used.user - used.system < seconds / 2


def test_a_pause_does_not_wait_for_the_step_delay(folder: Path, tmp_path: Path) -> None:
    with (
        engine(folder, tmp_path / "ready", "--weight-version", "4", **{DELAY: "30000"}),
        ThreadPoolExecutor(2) as pool,
        httpx.Client(base_url=wait_for_ready(tmp_path / "ready")["url"], timeout=20) as client,
    ):
        sampling = {"max_new_tokens": 9, "ignore_eos": True}
        call = {"input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True}
        running = pool.submit(client.post, "/generate", json=call)
        deadline = time.monotonic() + DEADLINE_S
        while not client.get("/v1/loads").json()["loads"][0]["generated_tokens"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
        assert client.post("/pause_generation", json={"mode": "abort"}).status_code == 200
        body = running.result(DEADLINE_S).json()
        assert time.monotonic() - started < 10
        meta = body["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert (len(body["output_ids"]), meta["weight_version"]) == (1, "4")
        late = pool.submit(client.post, "/generate", json=call | {"rid": "late"})
        while not client.get("/server_info").json()["num_gated_requests"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        client.post("/update_weight_version", json={"new_version": "5"})
        client.post("/continue_generation", json={})
        while not client.get("/v1/loads").json()["loads"][0]["num_running_reqs"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        client.post("/abort_request", json={"rid": "late"})
        assert late.result(DEADLINE_S).json()["meta_info"]["weight_version"] == "5"


def test_engine_ends_with_its_parent(folder: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    arguments = command(folder, "--ready-file", str(ready), "--exit-with-parent")
    script = f"import subprocess\nsubprocess.Popen({arguments!r}).wait()"
    parent = subprocess.Popen([sys.executable, "-c", script], env=ENVIRONMENT)
    child = psutil.Process(wait_for_ready(ready)["pid"])
    parent.kill()
    parent.wait(DEADLINE_S)
    child.wait(DEADLINE_S)


def test_engine_survives_the_thread_that_started_it(folder: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    arguments = command(folder, "--ready-file", str(ready), "--exit-with-parent")
    # The kernel's parent-death signal comes when the starting thread ends, not the process.
    script = (
        "import pathlib, subprocess, sys, threading, time\n"
        "def start():\n"
        f"    subprocess.Popen({arguments!r})\n"
        f"    while not pathlib.Path({str(ready)!r}).exists(): time.sleep(0.02)\n"
        "thread = threading.Thread(target=start)\n"
        "thread.start(); thread.join(); print('ended', flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ended\n"
    told = wait_for_ready(ready)
    assert httpx.get(told["url"] + "/health").status_code == 200
    child = psutil.Process(told["pid"])
    parent.communicate(timeout=DEADLINE_S)
    child.wait(DEADLINE_S)
