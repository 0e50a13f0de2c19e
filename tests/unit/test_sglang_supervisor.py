"""The supervisor of an SGLang server, with real processes around a server that starts at once."""

import asyncio
import json
import os
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from models.errors import ConfigurationError, EngineLost
from tests.support.fake_sglang import write_fake_sglang
from workers.engines.process import ServerCommand, ServerProcess

START_S = 30.0
SOON_S = 10.0


def command(folder: Path, mode: str = "serves", **arguments: Any) -> ServerCommand:
    environment = write_fake_sglang(folder / "site")
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    ready = folder / "ready.json"
    told = json.dumps({"model_path": str(model)} | arguments)
    return ServerCommand(
        name="engine-0",
        argv=(
            *(sys.executable, "-m", "workers.engines.sglang", "--ready-file", str(ready)),
            *("--arguments", told),
        ),
        env=environment | {"FAKE_SGLANG": mode, "TOLD": "from the actor"},
        log_path=folder / "engine-0.log",
        ready_file=ready,
    )


async def start(folder: Path, mode: str = "serves", **arguments: Any) -> ServerProcess:
    return await ServerProcess.start(command(folder, mode, **arguments), START_S)


PARTS = ("server", "sglang::scheduler", "sglang::detokenizer")


def logged(folder: Path, *parts: str) -> list[int]:
    """Process ids that the server logged behind these words."""
    names = "|".join(re.escape(part) for part in parts)
    found = re.findall(rf"^(?:{names}) (\d+)", (folder / "engine-0.log").read_text(), re.M)
    return [int(pid) for pid in found]


def processes(folder: Path) -> list[int]:
    found = logged(folder, *PARTS)
    assert len(found) == len(PARTS)
    return found


async def gone(pids: list[int]) -> None:
    async with asyncio.timeout(SOON_S):
        for pid in pids:
            while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)


async def test_a_server_serves_on_its_port_and_its_end_leaves_nothing(tmp_path: Path) -> None:
    server = await start(tmp_path)

    assert server.url.startswith("http://127.0.0.1:")
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{server.url}/health")).status_code == 200
    assert "told from the actor" in (tmp_path / "engine-0.log").read_text()
    assert all(psutil.pid_exists(pid) for pid in processes(tmp_path))

    async with asyncio.timeout(SOON_S):
        exit_ = await server.stop(grace_s=SOON_S)
    assert exit_.returncode == 0
    await gone(processes(tmp_path))


@pytest.mark.parametrize("mode", ["serves", "refuses"])
async def test_a_server_that_generates_is_made_ready_for_what_would_stop_it_later(
    tmp_path: Path, mode: str
) -> None:
    """Once, and before anybody is told that it serves; without that it serves as well."""
    server = await start(tmp_path, mode)
    log = (tmp_path / "engine-0.log").read_text()
    warned = mode == "refuses"
    assert ("the first unlike samples may take long" in log) is warned
    assert ("searches for garbage stay long" in log) is warned
    asked = re.findall(r"HTTP Request: \w+ http://[^/]+(/\w+)", log)
    last = ["/health", "/generate", "/freeze_gc"]
    if mode == "serves":  # a token passes the process that is at it last
        last.append("/health")
    assert asked[-len(last) :] == last
    await server.stop(grace_s=SOON_S)


async def test_the_first_batch_has_requests_of_every_kind(tmp_path: Path) -> None:
    """SGLang 0.5.17, ``Sampler._sample_from_probs``: only such a batch takes FlashInfer's way."""
    server = await start(tmp_path)
    log = (tmp_path / "engine-0.log").read_text()
    (sent,) = re.findall(r"^posted /generate (.*)$", log, re.M)
    batch = json.loads(sent)
    kinds = batch["sampling_params"]
    assert len(batch["input_ids"]) == len(kinds)
    assert {"temperature": 0.0, "max_new_tokens": 2} in kinds
    assert any(each.get("top_k", -1) > 1 for each in kinds)
    assert any(each.get("top_p", 1.0) < 1.0 for each in kinds)
    await server.stop(grace_s=SOON_S)


async def test_a_request_does_not_hold_up_the_end(tmp_path: Path) -> None:
    server = await start(tmp_path)
    async with httpx.AsyncClient(trust_env=False, timeout=START_S) as client:
        call = asyncio.create_task(client.get(f"{server.url}/slow"))
        async with asyncio.timeout(SOON_S):
            while "request arrived" not in server.log_tail():
                await asyncio.sleep(0.01)
            exit_ = await server.stop(grace_s=SOON_S)
            with pytest.raises(httpx.TransportError):
                await call
    assert exit_.returncode == 0
    await gone(processes(tmp_path))


async def test_a_server_that_dies_before_it_serves_is_an_engine_lost(tmp_path: Path) -> None:
    with pytest.raises(EngineLost, match=r"(?s)no room for the model.*ended with status 7"):
        await start(tmp_path, "dies")
    await gone(processes(tmp_path))


async def test_a_server_that_never_serves_is_ended_at_the_deadline(tmp_path: Path) -> None:
    asked = command(tmp_path, "never")
    argv = (*asked.argv, "--start-timeout", "4")
    with pytest.raises(EngineLost, match=r"did not serve within 4 s"):
        await ServerProcess.start(
            ServerCommand(asked.name, argv, asked.env, asked.log_path, asked.ready_file), START_S
        )
    await gone(logged(tmp_path, *PARTS))  # a slow machine had not started them all


@pytest.mark.parametrize("part", ["server", "sglang::scheduler", "sglang::detokenizer"])
async def test_the_end_of_any_part_is_the_end_of_the_engine(tmp_path: Path, part: str) -> None:
    server = await start(tmp_path)
    everything = processes(tmp_path)

    (pid,) = logged(tmp_path, part)
    os.kill(pid, signal.SIGKILL)

    async with asyncio.timeout(SOON_S):
        exit_ = await server.wait_exit()
    assert exit_.returncode == 1
    assert "the server ended" in exit_.log_tail or f"{part} (process" in exit_.log_tail
    await gone(everything)


async def test_nothing_survives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    server = await start(tmp_path)

    os.kill(server.pid, signal.SIGKILL)

    async with asyncio.timeout(SOON_S):
        await server.wait_exit()
    await gone(processes(tmp_path))


async def test_nothing_survives_an_actor_that_is_killed(tmp_path: Path) -> None:
    asked = command(tmp_path)
    script = f"""
    import asyncio, os
    from pathlib import Path
    from workers.engines.process import ServerCommand, ServerProcess
    command = ServerCommand(
        "engine-0", {asked.argv!r}, dict(os.environ), Path({str(asked.log_path)!r}),
        Path({str(asked.ready_file)!r}),
    )
    async def main():
        server = await ServerProcess.start(command, {START_S})
        print(server.pid, flush=True)
        await asyncio.sleep(120)
    asyncio.run(main())
    """
    actor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", textwrap.dedent(script)),
        env=dict(asked.env),
        stdout=asyncio.subprocess.PIPE,
    )
    assert actor.stdout is not None
    async with asyncio.timeout(START_S):
        supervisor = int(await actor.stdout.readline())
    actor.kill()
    await actor.wait()
    await gone([supervisor, *processes(tmp_path)])


async def test_what_sglang_refuses_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ValueError: mem_fraction_static must be at mos"):
        await start(tmp_path, mem_fraction_static=1.5)


async def test_an_argument_that_sglang_lacks_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"inference\.sglang\.mem_fraction = 0\.5.*'mem_fraction_static'"
    ):
        await start(tmp_path, mem_fraction=0.5)


async def test_a_model_folder_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    asked = command(tmp_path)
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"FileNotFoundError.*config\.json"):
        await ServerProcess.start(asked, START_S)
