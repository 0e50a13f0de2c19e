"""A schedule that fires twice on real workers: one promotion, one refusal, with kills in between.

Its own command: ``pytest -m chaos tests/chaos/test_retraining.py -s``; minutes on two cores.
"""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from kill_harness import Stack

from activities.storage import layout
from activities.storage.store import Store
from configs.data import TaskSpec
from workers.sources.tasks import Question, generate_questions

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

RUN_FILE = """
schema_version = 1
name = "weekly"

[model]
source = "{model}"

[data]
prompt_data = "seed.jsonl"
eval_prompt_data = "eval.jsonl"

[output]
root = "{root}"
export_hf = true

[training]
num_rollouts = 20
rollout_batch_size = 16
samples_per_prompt = 8
global_batch_size = 64
save_interval = 5

[evaluation]
samples_per_prompt = 2

[optimizer]
learning_rate = 1e-3
lr_warmup_steps = 9
lr_warmup_init = 1e-4

[core]
max_policy_lag = 1
max_context_length = 64
filter_zero_std_groups = false

[trainer]
num_threads = 1

[inference]
dtype = "float32"
num_threads = 1
max_response_length = 5
max_running_requests = 128
server_concurrency = 128
"""


def write_rows(path: Path, questions: list[Question], answer: Any) -> None:
    rows = [{"question": q.question, "answer": answer(q)} for q in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def trigger(stack: Stack) -> dict[str, Any]:
    """What ``perdure schedule trigger --wait`` ends with."""
    done = await asyncio.to_thread(
        stack.perdure, "schedule", "trigger", "weekly", "--wait", "--json", timeout_s=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


async def until_trained(root: Path, updates: int) -> None:
    """Wait until the newest run of the retraining has finished so many updates."""
    async with asyncio.timeout(240):
        while True:
            runs = sorted((root / "runs").glob(f"*/{layout.UPDATES}"))
            if runs and len(runs[-1].read_text().splitlines()) >= updates:
                return
            await asyncio.sleep(0.2)


def kill(stack: Stack, *services: str) -> None:
    pids = stack.pids()
    for service in services:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[service], signal.SIGKILL)


async def test_a_good_week_and_a_bad_one(stack: Stack, tiny_model: Path, tmp_path: Path) -> None:
    """The second week's answers are the words as they are, not reversed: training on them hurts."""
    root, new = tmp_path / "retraining", tmp_path / "new"
    new.mkdir()
    task = TaskSpec(task="reverse_word", params={"letters": 3})
    drawn = generate_questions(task, 17, train_count=2048, eval_count=256)
    write_rows(tmp_path / "eval.jsonl", drawn.held_out, lambda q: q.answer)
    write_rows(tmp_path / "seed.jsonl", drawn.train[:1], lambda q: q.answer)
    write_rows(new / "week-1.jsonl", drawn.train[:1024], lambda q: q.answer)
    run_file = tmp_path / "weekly.toml"
    run_file.write_text(RUN_FILE.format(model=tiny_model, root=root))
    created = stack.perdure(
        *("schedule", "create", str(run_file), "--data", f"{new}/*.jsonl"),
        *("--cron", "0 3 * * Mon", "--note", "two weeks"),
    )
    assert created.returncode == 0, created.stderr
    print(created.stderr)

    firing = asyncio.create_task(trigger(stack))
    await until_trained(root, 7)
    kill(stack, "control", "gpu")
    good = await firing
    print(json.dumps(good, indent=2))
    assert good["decision"] == "promoted"
    pointer = Store(root).read_json(layout.LATEST_EXPORT)
    assert pointer["export"] == good["export"]

    write_rows(new / "week-2.jsonl", drawn.train[1024:], lambda q: q.answer[::-1])
    bad = await trigger(stack)
    print(json.dumps(bad, indent=2))
    assert bad["decision"] == "refused"
    assert bad["comparison"]["candidate"] < bad["comparison"]["parent"]
    assert Store(root).read_json(layout.LATEST_EXPORT) == pointer

    nothing = await trigger(stack)
    assert nothing["decision"] == "nothing_to_do"
    print(nothing["reason"])
    first, second = (Store(root).read_json(layout.lineage_record(n)) for n in (1, 2))
    assert second["parent"]["digest"] == first["export"]["digest"] == pointer["digest"]
    shown = stack.perdure("schedule", "describe", "weekly")
    print(shown.stdout)
    assert stack.perdure("schedule", "delete", "weekly").returncode == 0
