"""A run whose payloads are encrypted: what Temporal stores, who can read it, what a worker without
the key does, and the codec server for Temporal's own CLI."""

import asyncio
import base64
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf.duration_pb2 import Duration
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.testing import WorkflowEnvironment

from activities.catalog import ControlActivities
from models.errors import ConfigurationError
from models.run import RunOutcome, RunState
from workers.codec_server import CodecServer
from workers.connection import ensure_search_attributes
from workers.payload_codec import EncryptionCodec
from workers.payload_keys import payload_keys
from workers.plugin import perdure_plugin
from workers.serving import build_worker
from workflows.options import CONTROL_QUEUE

pytestmark = pytest.mark.workflow
pytest.importorskip("cryptography", reason="cryptography is not installed")

NAMESPACE = "encrypted"
TEMPORAL = Path(sys.executable).parent / "temporal"
KEYS = f"k2:{'a1' * 32},k1:{'0f' * 32}"
UI = "http://127.0.0.1:8233"
TOKEN = "canaryofthetoken"


async def client_of(temporal: WorkflowEnvironment) -> Client:
    """With the keys of the environment, as every client of the product has them."""
    address = temporal.client.service_client.config.target_host
    return await Client.connect(address, namespace=NAMESPACE, plugins=[perdure_plugin()])


@pytest.fixture
async def keyless(temporal: WorkflowEnvironment) -> Client:
    return await client_of(temporal)


@pytest.fixture
def with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_PAYLOAD_KEYS", KEYS)
    monkeypatch.setenv("PERDURE_PAYLOAD_ENCRYPT_FAILURES", "1")


@pytest.fixture
async def temporal_client(
    temporal: WorkflowEnvironment, keyless: Client, with_keys: None
) -> Client:
    client = await client_of(temporal)
    request = RegisterNamespaceRequest(
        namespace=NAMESPACE, workflow_execution_retention_period=Duration(seconds=86400)
    )
    await client.workflow_service.register_namespace(request)
    async with asyncio.timeout(30):
        while not await ensure_search_attributes(client):
            await asyncio.sleep(0.1)
    return client


@pytest.fixture
async def control_worker() -> None:
    """The test starts its own."""


@pytest.fixture
def codec_server(with_keys: None) -> Iterator[CodecServer]:
    with CodecServer(EncryptionCodec(payload_keys()), TOKEN, [UI], port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def shown(address: str, workflow_id: str, *options: str) -> str:
    """The history as Temporal's own CLI shows it."""
    done = subprocess.run(
        [
            *(str(TEMPORAL), "workflow", "show", "--workflow-id", workflow_id, "--output", "json"),
            *("--address", address, "--namespace", NAMESPACE, *options),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout + done.stderr


async def readable(address: str, workflow_id: str, *options: str) -> bool:
    """Whether it shows a payload as JSON, which it prints in base64."""
    text = await asyncio.to_thread(shown, address, workflow_id, *options)
    return base64.b64encode(b"json/plain").decode() in text


async def until_a_task_failed(handle: WorkflowHandle[Any, Any]) -> str:
    """What the first failed workflow task says."""
    async with asyncio.timeout(30):
        while True:
            async for event in handle.fetch_history_events():
                if event.HasField("workflow_task_failed_event_attributes"):
                    return event.workflow_task_failed_event_attributes.failure.message
            await asyncio.sleep(0.05)


async def test_a_run_is_readable_with_the_key_only(
    make_stage: Any, temporal_client: Client, keyless: Client, codec_server: CodecServer
) -> None:
    stage = await make_stage()
    async with build_worker(keyless, CONTROL_QUEUE, ControlActivities().all()):
        waiting = await stage.start()
        assert "key 'k2', this process has none" in await until_a_task_failed(waiting)
        assert (await waiting.describe()).status is WorkflowExecutionStatus.RUNNING
        # With the key it would go on, at the server's next try; that is seconds away.
        await waiting.terminate()
        stage.handles.clear()
    async with build_worker(temporal_client, CONTROL_QUEUE, ControlActivities().all()):
        handle = await stage.start()
        outcome: RunOutcome = await asyncio.wait_for(handle.result(), 40)
        assert outcome.state is RunState.COMPLETE

        impossible = stage.document()
        impossible["core"]["max_run_seconds"] = -1
        refused = await stage.start(impossible)
        assert "max_run_seconds" in (await stage.failure(refused)).message

    secret = str(stage.root)
    raw = [history.to_json() for history in await stage.histories()]
    assert len(raw) == 3
    assert not any(secret in text or "max_run_seconds" in text for text in raw)
    async for listed in temporal_client.list_workflows():
        assert secret not in str(listed.raw_info)

    with pytest.raises(ConfigurationError, match="key 'k2', this process has none"):
        await keyless.get_workflow_handle(handle.id, result_type=RunOutcome).result()

    address = temporal_client.service_client.config.target_host
    endpoint = ("--codec-endpoint", codec_server.url)
    assert not await readable(address, handle.id)
    assert not await readable(address, handle.id, *endpoint)
    bearer = ("--codec-auth", f"Bearer {TOKEN}")
    assert await readable(address, handle.id, *endpoint, *bearer)
    by_path = ("--codec-endpoint", f"{codec_server.url}/{TOKEN}")
    assert await readable(address, handle.id, *by_path)


def answer_to_head(server: CodecServer, *headers: str) -> bytes:
    """What it says to a request of which it gets the body, 9 bytes, only when it asks for it."""
    head = "\r\n".join(["POST /decode HTTP/1.1", "host: x", *headers, "", ""])
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as client:
        client.sendall(head.encode())
        answer = b""
        while chunk := client.recv(4096):
            answer += chunk
            if chunk.startswith(b"HTTP/1.1 100"):
                client.sendall(b"not JSON!")
        return answer


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["content-length: 1000"], b"401"),
        (["content-length: 1000", "authorization: Bearer no", "expect: 100-continue"], b"401"),
        (["content-length: 99999999999", "authorization: Bearer no"], b"401"),
        (["content-length: 33554433", f"authorization: Bearer {TOKEN}"], b"413"),
        (["transfer-encoding: chunked", f"authorization: Bearer {TOKEN}"], b"413"),
        (["content-length: -1", f"authorization: Bearer {TOKEN}"], b"413"),
        (
            [
                *("content-length: 9", f"authorization: Bearer {TOKEN}"),
                *("expect: 100-continue", "connection: close"),
            ],
            b"100",
        ),
    ],
)
def test_the_codec_server_reads_bodies_of_moderate_length_from_the_token_only(
    codec_server: CodecServer, headers: list[str], status: bytes
) -> None:
    answer = answer_to_head(codec_server, *headers)
    assert answer.split()[1] == status
    assert (b"HTTP/1.1 400" in answer) == (status == b"100")
    assert answer.count(b"connection: close") == 1


async def test_the_codec_server_answers_known_origins_and_the_token_only(
    codec_server: CodecServer,
) -> None:
    body = {"payloads": [{"metadata": {"encoding": "anNvbi9wbGFpbg=="}, "data": "Imhvb3JheSI="}]}
    async with httpx.AsyncClient(base_url=codec_server.url, timeout=10, trust_env=False) as client:
        for path in ("/decode", "/wrong/decode", f"/{TOKEN}x/decode"):
            answer = await client.post(path, json=body, headers={"authorization": "Bearer no"})
            assert answer.status_code == 401
        bearer = {"authorization": f"Bearer {TOKEN}"}
        sealed = (await client.post("/encode", json=body, headers=bearer)).json()
        assert "Imhvb3JheSI" not in json.dumps(sealed)
        clear = await client.post(f"/{TOKEN}/decode", json=sealed, headers={"origin": UI})
        assert clear.json() == body
        assert clear.headers["access-control-allow-origin"] == UI

        asked = await client.request("OPTIONS", f"/{TOKEN}/decode", headers={"origin": UI})
        assert asked.status_code == 204
        assert "x-namespace" in asked.headers["access-control-allow-headers"]
        for foreign in ("http://evil.example", "null"):
            other = await client.request("OPTIONS", "/decode", headers={"origin": foreign})
            assert "access-control-allow-origin" not in other.headers

        assert (await client.post("/other", json=body, headers=bearer)).status_code == 404
        broken = await client.post("/decode", content=b"\xff", headers=bearer)
        assert broken.status_code == 400
        del sealed["payloads"][0]["metadata"]["encryption-key-id"]
        lost = await client.post("/decode", json=sealed, headers=bearer)
        assert lost.status_code == 400
        assert "this process has k2, k1" in lost.json()["detail"]
