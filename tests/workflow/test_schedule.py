"""``perdure schedule`` and the stock ``temporal`` program on a real server, the fleet faked."""

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.retraining import Decision, RetrainingOutcome
from tests.support.retraining_rig import RetrainingDesk, RetrainingFleet
from workers.cli import output
from workers.cli.app import run_command

pytestmark = pytest.mark.workflow

TEMPORAL = str(Path(sys.executable).parent / "temporal")


class Console:
    """A user at the command line beside the test's server."""

    def __init__(self, stage: Any, capsys: pytest.CaptureFixture[str]) -> None:
        self.stage, self.capsys = stage, capsys
        self.fleet: RetrainingFleet = stage.fleet
        self.desk = RetrainingDesk(stage.root, stage.name, stage.name)
        self.file = stage.root / "run.json"
        self.address = stage.client.service_client.config.target_host
        self.schedule_id = f"retrain/{stage.name}"
        self.write()

    def write(self, **sections: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(self.desk.document(**sections)))

    async def perdure(self, *words: str, code: int = 0, at_server: bool = True) -> Any:
        """The command's standard output and error; activities log to the former as well."""
        where = ["--address", self.address] if at_server else []
        output.out.cache_clear()
        output.err.cache_clear()
        self.capsys.readouterr()
        found = await asyncio.to_thread(run_command, ["schedule", *words, *where])
        printed = self.capsys.readouterr()
        assert found == code, printed.err
        return printed

    async def json(self, *words: str) -> dict[str, Any]:
        printed = await self.perdure(*words, "--json")
        line: dict[str, Any] = json.loads(printed.out.splitlines()[-1])
        return line

    async def temporal(self, *words: str) -> str:
        """The output of the stock program."""
        done = await asyncio.to_thread(
            subprocess.run, [TEMPORAL, *words], capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def create(self, *words: str) -> list[str]:
        return ["create", str(self.file), "--data", f"{self.desk.new}/*.jsonl", *words]


@pytest.fixture
async def console(make_stage: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> Console:
    return Console(await make_stage(fleet_class=RetrainingFleet), capsys)


async def test_a_schedule_from_its_creation_to_its_end(console: Console) -> None:
    times = ["--cron", "0 3 * * Mon", "--every", "6h/5h", "--calendar", '{"hour":"4-6"}']
    limits = ["--catch-up", "2h", "--jitter", "5m", "--note", "weekly", "--time-zone", "CET"]
    printed = await console.perdure(*console.create(*times, *limits))
    assert f"warning: --data {console.desk.new}/*.jsonl: no file matches yet" in printed.err
    assert f"{console.desk.root}/latest.json" in printed.err
    with_same_name = await console.perdure(*console.create("--every", "1h"), code=1)
    assert f"{console.schedule_id} exists already" in with_same_name.err

    view = await console.json("describe", str(console.file))
    assert (view["paused"], view["note"], view["overlap"]) == (False, "weekly", "skip")
    assert len(view["next_times"]) == 10
    assert (view["root"], view["latest"], view["decisions"]) == (str(console.desk.root), None, [])
    described = json.loads(
        await console.temporal(
            *("schedule", "describe", "--schedule-id", console.schedule_id, "--output", "json"),
            *("--address", console.address),
        )
    )
    schedule = described["schedule"]
    assert schedule["policies"]["catchupWindow"] == "7200s"
    assert schedule["spec"]["jitter"] == "300s"
    assert len(schedule["spec"]["structuredCalendar"]) == 2
    assert schedule["spec"]["interval"] == [{"interval": "21600s", "phase": "18000s"}]

    console.desk.add_data("a.jsonl")
    console.fleet.scores(0.25, 0.5)
    assert (await console.json("trigger", console.stage.name, "--wait"))["decision"] == "promoted"
    console.desk.add_data("b.jsonl")
    console.fleet.scores(0.5, 0.25)
    refused = await console.perdure("trigger", console.schedule_id, "--wait")
    assert "refused: regression: eval/heldout 0.25 after 0.5" in refused.out
    view = await console.json("describe", console.stage.name)
    assert [each["decision"] for each in view["decisions"]] == ["promoted", "refused"]
    assert view["latest"]["record"] == 1
    assert view["num_firings"] == 2
    shown = await console.perdure("describe", console.stage.name)
    assert "2. " in shown.out
    assert view["latest"]["export"] in shown.out

    await console.perdure("pause", console.stage.name, "--note", "holiday")
    listed = await console.json("list")
    (mine,) = [s for s in listed["schedules"] if s["schedule_id"] == console.schedule_id]
    assert (mine["paused"], mine["note"]) == (True, "holiday")
    await console.perdure("unpause", console.stage.name)
    assert not (await console.json("describe", console.stage.name))["paused"]
    await console.perdure("delete", console.stage.name)
    gone = await console.perdure("describe", console.stage.name, code=1)
    assert f"{console.schedule_id}: there is no such schedule" in gone.err


async def test_the_stock_program_creates_fires_and_deletes(console: Console) -> None:
    """The command that ``create`` prints, typed as it stands."""
    printed = await console.perdure(*console.create("--cron", "@weekly", "--paused"))
    (line,) = [each for each in printed.err.splitlines() if "same as: perdure" in each]
    await console.perdure("delete", console.stage.name)
    render, _, create = line.partition("same as: ")[2].partition(" && ")
    words = shlex.split(render)
    rendered = await console.perdure(*words[2 : words.index(">")], at_server=False)
    target = console.stage.root / words[-1]
    target.write_text(rendered.out.splitlines()[-1])
    stock = shlex.split(create.replace(words[-1], str(target)))
    assert stock[0] == "temporal"
    await console.temporal(*stock[1:])

    console.desk.add_data("a.jsonl")
    console.fleet.scores(0.25, 0.5)
    where = ["--schedule-id", console.schedule_id, "--address", console.address]
    await console.temporal("schedule", "trigger", *where)
    view: dict[str, Any] = {"recent": []}
    async with asyncio.timeout(30):
        while not view["recent"]:
            view = await console.json("describe", console.stage.name)
            await asyncio.sleep(0.1)
        handle = console.stage.client.get_workflow_handle(
            view["recent"][0], result_type=RetrainingOutcome
        )
        outcome = await handle.result()
    assert outcome.decision is Decision.PROMOTED
    assert (await console.json("describe", console.stage.name))["latest"]["record"] == 1
    await console.temporal("schedule", "delete", *where)


async def test_a_firing_is_skipped_while_another_runs(console: Console) -> None:
    await console.perdure(*console.create("--every", "365d"))
    console.desk.add_data("a.jsonl")
    console.fleet.scores(0.25, 0.5)
    gate = console.fleet.script.hold("export")
    await console.perdure("trigger", console.stage.name)
    await console.fleet.script.reached("export")
    refused = await console.perdure("trigger", console.stage.name, "--wait", code=1)
    assert "was not fired" in refused.err
    gate.set()
    (running,) = (await console.json("describe", console.stage.name))["recent"]
    await console.stage.client.get_workflow_handle(running).result()
    await console.perdure("delete", console.stage.name)


@pytest.mark.parametrize(
    ("words", "sections", "message"),
    [
        ([], {}, "no time is given"),
        (["--every", "6 hours"], {}, "--every '6 hours' is no duration"),
        (["--every", "0s"], {}, "the interval must be above 0"),
        (["--cron", "every day"], {}, "retrain/"),
        (["--calendar", '{"day":"Mon"}'], {}, "no field 'day'"),
        (["--calendar", "Monday"], {}, "is not JSON"),
        (
            ["--every", "6h", "--metric", "eval/held_out"],
            {},
            'metric = "eval/held_out": no figure that a promotion can be decided by; did you mean '
            "'eval/heldout'?",
        ),
        (
            ["--every", "6h", "--max-unscored", "2"],
            {},
            "max_unscored_fraction = 2.0: must be a share from 0 to 1",
        ),
        (
            ["--every", "6h"],
            {"evaluation": {"final": False}},
            "evaluation.final = false: a promotion compares",
        ),
        (
            ["--every", "6h"],
            {"evaluation": {"mode": "background"}},
            'evaluation.mode = "background"',
        ),
        (
            ["--every", "6h"],
            {"data": {"eval_prompt_data": None}},
            "data.eval_prompt_data: there are no held-out prompts, so a promotion would have no",
        ),
        (["--every", "6h"], {"output": {"export_hf": False}}, "output.export_hf = false"),
        (["--every", "6h"], {"training": {"num_rollouts": 0}}, "training.num_rollouts"),
    ],
)
async def test_what_cannot_work_is_refused_at_the_creation(
    console: Console, words: list[str], sections: dict[str, Any], message: str
) -> None:
    console.write(**sections)
    refused = await console.perdure(*console.create(*words), code=2)
    assert message in refused.err
