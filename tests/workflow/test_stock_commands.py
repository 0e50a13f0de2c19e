"""The stock ``temporal`` commands that control verbs print do what the verbs do."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError

from workers.cli.app import run_command

pytestmark = pytest.mark.workflow

SAME = "same as: "


class Twins:
    """A run that is controlled by verbs, and one by the commands that these print."""

    def __init__(
        self, verbs: Any, stock: Any, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.verbs, self.stock = verbs, stock
        self._folder = folder
        self._capsys = capsys
        self._address = str(verbs.client.service_client.config.target_host)
        for stage in (verbs, stock):
            (folder / f"{stage.name}.json").write_text(
                json.dumps(stage.document(core={"checkpoint_keep_last": 4}))
            )

    def file(self, stage: Any) -> str:
        return str(self._folder / f"{stage.name}.json")

    async def do(self, verb: str, *arguments: str) -> str:
        """Run a verb on the one and what it printed on the other; return what the verb said."""
        told = await self.say(verb, *arguments)
        (line,) = [line for line in told.splitlines() if line.startswith(SAME)]
        await self.shell(line.removeprefix(SAME))
        return told

    async def say(self, verb: str, *arguments: str) -> str:
        self._capsys.readouterr()
        words = [verb, *arguments, "--address", self._address]
        code = await asyncio.wait_for(asyncio.to_thread(run_command, words), 40)
        told = self._capsys.readouterr().err
        assert code == 0, told
        return told

    async def shell(self, line: str) -> None:
        beside = str(Path(sys.executable).parent)
        process = await asyncio.create_subprocess_shell(
            line.replace(self.verbs.name, self.stock.name),
            cwd=self._folder,
            env={**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 40)
        assert process.returncode == 0, out.decode()

    async def until(self, condition: Callable[[Any], bool]) -> None:
        """Wait until the progress of both is as wished."""
        async with asyncio.timeout(20):
            for stage in (self.verbs, self.stock):
                while not condition(await stage.progress()):
                    await asyncio.sleep(0.02)

    async def ended(self) -> None:
        """Wait until both are closed."""
        async with asyncio.timeout(30):
            for stage in (self.verbs, self.stock):
                with contextlib.suppress(WorkflowFailureError):
                    await stage.client.get_workflow_handle(f"train/{stage.name}").result()


async def test_printed_commands_do_what_the_verbs_do(
    make_stage: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PERDURE_LAUNCH_RECEIPTS", str(tmp_path / "launches"))
    for name in ("TEMPORAL_NAMESPACE", "TEMPORAL_PROFILE", "TEMPORAL_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    twins = Twins(await make_stage(), await make_stage(), tmp_path, capsys)
    stages = (twins.verbs, twins.stock)
    gates = [stage.fleet.script.hold("collect 0") for stage in stages]
    told = await twins.do("start", twins.file(twins.verbs))
    for stage in stages:
        await stage.fleet.script.reached("collect 0")
    told = await twins.do("pause", twins.verbs.name)
    assert "pauses in the update loop, not at the admission gate" in told
    assert told.rstrip().endswith("nothing is sampled meanwhile")
    await twins.until(lambda progress: progress.paused)
    for gate in gates:
        gate.set()
    await twins.until(lambda progress: progress.stage == "paused")
    await twins.do("checkpoint", twins.verbs.name)
    await twins.until(lambda progress: progress.checkpoint is not None)
    holds = [stage.fleet.script.hold("collect 1") for stage in stages]
    await twins.do("resume", twins.verbs.name)
    for stage in stages:
        await stage.fleet.script.reached("collect 1")
    await twins.until(lambda progress: not progress.paused)
    await twins.do("stop", twins.verbs.name, "--reason", "it's lunch")
    await twins.until(lambda p: p.stop is not None and p.stop.reason == "it's lunch")
    for gate in holds:
        gate.set()
    await twins.ended()
    again = [stage.fleet.script.hold("collect 2") for stage in stages]
    await twins.do("rewind", twins.verbs.name, "--to", "1", "--reason", "it's worse")
    for stage in stages:
        await stage.fleet.script.reached("collect 1")
    await twins.until(lambda p: p.rewind is not None and p.rewind.reason == "it's worse")
    await twins.do("cancel", twins.verbs.name)
    for gate in again:
        gate.set()
    await twins.ended()
    for stage in stages:
        assert stage.fleet.log.count("teardown") == 2
