"""Engines and router refuse every call without their token, except looks at health and metrics."""

import contextlib
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, SamplingParams
from activities.wire.router_client import RouterClient
from configs.load import resolve_document
from models.errors import ContractViolation
from models.ids import RunRef
from models.routing import EngineState, RoutedEngine, RoutingTable
from tests.support.engine_model import GPU_SIZES, write_engine_model
from tests.support.router_rig import engine_client, router_process, token
from tests.support.served_engine import DEADLINE_S
from tests.support.sglang_server import (
    NO_SGLANG,
    RECIPE,
    sees_gpu,
    sglang_python,
    sglang_server,
)
from workers.actors.engine import server_command
from workers.actors.order import ActorOrder, fleet_token
from workers.engines.process import ServerProcess

TOKEN = "canary-of-the-token"
CONTROLS = (
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/weights_checker",
    "/update_weight_version",
)


@pytest.fixture(autouse=True)
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_ENGINE_TOKEN", TOKEN)


@contextlib.asynccontextmanager
async def native_engine(folder: Path) -> AsyncIterator[str]:
    """As a run starts it: the order of its actor brings the token along."""
    run = RunRef(run_id="train/x", root=str(folder), spec_sha256="s")
    order = ActorOrder(run=run, role="engine", scratch=str(folder), engine_token=fleet_token())
    spec = resolve_document(
        tomllib.loads(RECIPE.read_text()) | {"output": {"root": str(folder)}}, origin="tiny.toml"
    ).spec
    command = server_command(order, spec, write_engine_model(folder / "model", 0), version=3)
    assert TOKEN not in " ".join(command.argv)
    server = await ServerProcess.start(command, DEADLINE_S)
    try:
        yield server.url
    finally:
        await server.stop(grace_s=DEADLINE_S)


async def refuses(url: str, paths: tuple[str, ...], methods: tuple[str, ...] = ("POST",)) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False) as stranger:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
            for path in paths:
                for method in methods:
                    answer = await stranger.request(method, path, json={}, headers=headers)
                    assert answer.status_code == 401, (method, path, answer.text)
        assert (await stranger.get("/health")).status_code == 200
        assert (await stranger.get("/metrics")).status_code == 200


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncIterator[EngineClient]:
    made = engine_client(url)
    yield made
    await made.aclose()


async def test_native_engine_and_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with native_engine(tmp_path) as url, client(url) as known:
        await refuses(url, (*CONTROLS, "/generate"))
        await refuses(url, ("/model_info", "/server_info", "/v1/loads"), ("GET",))
        await known.pause("abort")
        await known.resume()
        async with router_process(tmp_path) as router, client(router.url) as routed:
            await refuses(router.url, ("/generate", "/abort_request", "/router/drain"))
            await refuses(router.url, ("/router/table", "/router/state"), ("PUT", "GET"))
            row = RoutedEngine(
                name="engine-0", url=url, incarnation=0, version=3, digest="d",
                state=EngineState.SERVING,
            )  # fmt: skip
            table = RoutingTable(engines=(row,), committed=((3, "d"),))
            await router.control.set_table(token(), table)
            sampling = SamplingParams(max_new_tokens=2)
            request = GenerateRequest(rid="a" * 32, input_ids=[1, 2], sampling_params=sampling)
            answer = await routed.generate(request, timeout_s=DEADLINE_S)
            assert answer.meta_info.weight_version == "3"

            monkeypatch.setenv("PERDURE_ENGINE_TOKEN", "another")
            stranger = RouterClient(router.url)
            with pytest.raises(ContractViolation, match="401"):
                await stranger.state()
            await stranger.aclose()
        async with client(url) as unknown:
            with pytest.raises(ContractViolation, match="401"):
                await unknown.abort_all()


@pytest.mark.sglang
@pytest.mark.timeout(300)
async def test_sglang(tmp_path: Path) -> None:
    python = sglang_python()
    if python is None:
        pytest.skip(NO_SGLANG)
    sizes = GPU_SIZES if sees_gpu(python) else {}
    with sglang_server(write_engine_model(tmp_path / "model", 0, **sizes), tmp_path) as url:
        await refuses(url, (*CONTROLS, "/generate"))
        await refuses(url, ("/model_info", "/server_info"), ("GET",))
        async with client(url) as known:
            assert "weight_version" in await known.model_info()
            await known.abort_all()
            await known.pause("abort")
            await known.resume()
    assert TOKEN not in (tmp_path / "engine.log").read_text()
    assert "api_key='***'" in (tmp_path / "engine.log").read_text()
