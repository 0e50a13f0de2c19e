"""Verifiers: right, wrong, empty and hostile answers, from every kind of thread and process."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal

import psutil
import pytest

from activities.verifiers import exact, gym, number
from activities.verifiers.base import error, score, total_reward, truncated
from activities.verifiers.process_pool import ProcessPool, WorkerFailed
from activities.verifiers.registry import VerifierSet, build_verifiers
from models.errors import ConfigurationError
from models.prompt import PreparedPrompt, PromptMetadata, VerifierTarget
from models.sample import Verdict, VerdictOutcome

SCORE, INVALID, ERROR = VerdictOutcome.SCORE, VerdictOutcome.INVALID, VerdictOutcome.ERROR


def prompt(*targets, extra=None):
    return PreparedPrompt(
        input="",
        label="",
        prompt_token_ids=(1,),
        metadata=PromptMetadata(
            prepared_sample_id="t:train:0",
            source_dataset="t",
            source_row=0,
            query="",
            verifiers=targets,
            run_prompt_tokens=1,
            run_prompt_token_ids_sha256="",
            extra=extra or {},
        ),
    )


def target(name, value, weight=1.0):
    return VerifierTarget(name=name, target=value, weight=weight)


@pytest.mark.parametrize(
    ("expected", "text", "outcome", "value"),
    [
        ("abc", "abc", SCORE, 1.0),
        ("abc", "  abc\n", SCORE, 1.0),
        ("abc", "Abc", SCORE, 0.0),
        ("abc", "abc abc", SCORE, 0.0),
        ("abc", "", INVALID, 0.0),
        ("abc", " \n\t", INVALID, 0.0),
        ("\u00e9", "e\u0301", SCORE, 0.0),
        ("a" * 100, "a" * 1_000_000, SCORE, 0.0),
    ],
)
def test_exact(expected, text, outcome, value):
    verdict = exact.grade(target("exact", expected), text)
    assert (verdict.outcome, verdict.score) == (outcome, value)


NUMBERS = [
    ("18", "The answer is 18.", SCORE, 1.0),
    ("18", "18.00", SCORE, 1.0),
    ("18.0", "#### 18", SCORE, 1.0),
    ("1234567", "1,234,567 people", SCORE, 1.0),
    ("1,234", "1234", SCORE, 1.0),
    ("-5", "x = -5", SCORE, 1.0),
    ("-5", "x = \u22125", SCORE, 1.0),
    ("5", "x = -5", SCORE, 0.0),
    ("5", "10-5", SCORE, 1.0),
    ("5", "(10)-5", SCORE, 1.0),
    ("5", "+5", SCORE, 1.0),
    ("0.5", "about .5", SCORE, 1.0),
    ("7", "first 7, then 8", SCORE, 0.0),
    ("8", "first 7, then 8", SCORE, 1.0),
    ("3", "18. 3.", SCORE, 1.0),
    ("12", "$12", SCORE, 1.0),
    ("12", "12%", SCORE, 1.0),
    ("12", "**12**", SCORE, 1.0),
    ("12", "\\boxed{12}", SCORE, 1.0),
    ("0.1", "0.1000000000000000055", SCORE, 0.0),
    ("12", "1 2", SCORE, 0.0),
    ("12", "\u0661\u0662", INVALID, 0.0),
    ("12", "twelve", INVALID, 0.0),
    ("12", "", INVALID, 0.0),
    ("12", "...,,,---", INVALID, 0.0),
    ("12", "__import__('os').system('true')", INVALID, 0.0),
    ("twelve", "12", ERROR, math.nan),
]


@pytest.mark.parametrize(("expected", "text", "outcome", "value"), NUMBERS)
def test_number(expected, text, outcome, value):
    verdict = number.grade(target("number", expected), text)
    assert verdict.outcome is outcome
    assert verdict.score == pytest.approx(value, nan_ok=True)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["9" * 1_000_000, "1 " * 500_000, "-" * 1_000_000, "1,2" * 333_333, "." * 1_000_000]
)
def test_number_takes_a_megabyte(text):
    assert number.grade(target("number", "7"), text).score == 0.0


def test_last_number_is_exact():
    assert number.last_number("0.1") == Decimal("0.1")


async def score_all(verifiers, cases):
    found = []
    for each, text in cases:
        found += await verifiers.score(each, text)
    return [(verdict.name, verdict.outcome.value, repr(verdict.score)) for verdict in found]


def gym_entry(answer="42"):
    metadata = {"source_dataset": "products", "source_index": 0, "expression": "6 * 7"}
    return {"question": "6 * 7", "answer": answer, "metadata": metadata}


def cases():
    numbers = [(prompt(target("number", expected)), text) for expected, text, _, _ in NUMBERS]
    gyms = [
        (prompt(target("gym", "42"), extra=gym_entry()), text)
        for text in ("42", "<answer> 42 </answer>", "41", "", "(" * 10_000)
    ]
    return numbers + gyms


def in_subprocess():
    """The verdicts of ``cases`` as a fresh interpreter gives them."""
    rows = [(each.model_dump(mode="json"), text) for each, text in cases()]
    code = (
        "import asyncio, json, sys\n"
        "from activities.verifiers.registry import build_verifiers\n"
        "from models.prompt import PreparedPrompt\n"
        "async def main():\n"
        "    verifiers = build_verifiers()\n"
        "    found = []\n"
        "    for row, text in json.load(sys.stdin):\n"
        "        prompt = PreparedPrompt.model_validate(row)\n"
        "        found += await verifiers.score(prompt, text)\n"
        "    await verifiers.aclose()\n"
        "    print(json.dumps([(v.name, v.outcome.value, repr(v.score)) for v in found]))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return [tuple(row) for row in json.loads(done.stdout)]


def in_thread():
    """The same from an event loop in another thread."""
    found = []

    async def main():
        verifiers = build_verifiers()
        found.extend(await score_all(verifiers, cases()))
        await verifiers.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(timeout=50)
    return found


async def test_same_verdicts_in_main_thread_other_thread_and_subprocess():
    verifiers = build_verifiers()
    here = await score_all(verifiers, cases())
    await verifiers.aclose()
    assert len(here) == len(NUMBERS) + 5
    gym_rows = here[len(NUMBERS) :]
    assert gym_rows[0] == gym_rows[1] == ("gym", "score", "1.0")
    assert gym_rows[2][:2] == ("gym", "score")
    assert float(gym_rows[2][2]) < 1.0
    assert gym_rows[3] == ("gym", "invalid", "0.0")
    assert await asyncio.to_thread(in_thread) == here
    assert await asyncio.to_thread(in_subprocess) == here


@pytest.fixture
async def gym_verifier():
    made = gym.GymVerifier(num_workers=1)
    yield made
    await made.aclose()


@pytest.mark.timeout(90)
async def test_gym_survives_hostile_answers(gym_verifier):
    row = prompt(target("gym", "42"), extra=gym_entry())

    async def outcome(text, each=row):
        return await gym_verifier.verify(each, each.metadata.verifiers[0], text)

    assert (await outcome("42")).score == 1.0
    assert (await outcome("9" * 1_000_000)).outcome in (SCORE, ERROR)
    assert (await outcome("\n{}\u2028\x00")).outcome is SCORE
    entry = gym_entry()
    entry["metadata"]["source_dataset"] = "no_such_dataset"
    broken = await outcome("42", prompt(target("gym", "42"), extra=entry))
    assert broken.outcome is ERROR
    assert "no_such_dataset" in broken.detail
    without = await outcome("42", prompt(target("gym", "42")))
    assert without.outcome is ERROR
    assert (await outcome("42")).score == 1.0


ORPHAN_MAKER = """
import asyncio, sys
from activities.verifiers.gym import GymVerifier

async def main():
    verifier = GymVerifier(num_workers=1)
    entry = {"answer": "42", "metadata": {"source_dataset": "products"}}
    await verifier._pool.call({"entry": entry, "text": "42"})
    print(*verifier._pool.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_stuck_worker_dies_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN_MAKER], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    worker.suspend()  # stuck: it will not notice that its standard input ended
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone_or_zombie(worker, deadline_s=20)


def gone_or_zombie(process, deadline_s):
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError("the worker outlived its parent")


def test_a_missing_gym_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(gym.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"perdure\[gym\]"):
        build_verifiers().require("gym")


WORKER = """
import json, sys, time
print("{}", flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if task.get("do") == "hang":
        time.sleep(1000)
    if task.get("do") == "die":
        sys.exit(3)
    if task.get("do") == "babble":
        print("not json", flush=True)
        continue
    print(json.dumps({"echo": task["value"]}), flush=True)
"""


@pytest.fixture
async def pool():
    made = ProcessPool((sys.executable, "-c", WORKER), 2, budget_s=1.0, start_s=30.0)
    yield made
    await made.aclose()
    assert made.pids == []


async def test_a_hanging_worker_is_killed_in_its_budget_and_replaced(pool):
    loop = asyncio.get_running_loop()
    assert await pool.call({"value": 1}) == {"echo": 1}
    (before,) = pool.pids
    started = loop.time()
    with pytest.raises(WorkerFailed, match="within 1 s"):
        await pool.call({"do": "hang"})
    assert loop.time() - started < 5
    assert before not in pool.pids
    results = await asyncio.gather(*(pool.call({"value": value}) for value in range(20)))
    assert [each["echo"] for each in results] == [*range(20)]
    assert len(pool.pids) == 2


@pytest.mark.parametrize(("what", "message"), [("die", "died"), ("babble", "answered")])
async def test_a_broken_worker_is_replaced(pool, what, message):
    with pytest.raises(WorkerFailed, match=message):
        await pool.call({"do": what})
    assert await pool.call({"value": 2}) == {"echo": 2}


async def test_a_worker_killed_while_idle_costs_no_answer(pool):
    assert await pool.call({"value": 1}) == {"echo": 1}
    (idle,) = pool.pids
    os.kill(idle, signal.SIGKILL)
    (process,) = pool._live
    await asyncio.wait_for(process.wait(), 10)
    assert await pool.call({"value": 2}) == {"echo": 2}
    assert idle not in pool.pids


async def test_a_cancelled_call_does_not_shift_answers(pool):
    call = asyncio.ensure_future(pool.call({"do": "hang"}))
    while not pool.pids:
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pool.call({"value": 3}) == {"echo": 3}


async def test_a_worker_that_does_not_start_is_an_error():
    pool = ProcessPool((sys.executable, "-c", "raise SystemExit(1)"), 1, 1.0, 30.0)
    with pytest.raises(WorkerFailed, match="died"):
        await pool.call({})
    assert pool.pids == []


def test_reward_is_the_weighted_sum():
    verdicts = [score(target("a", "", 10.0), 1.0), score(target("b", "", 0.5), 0.5)]
    assert total_reward(verdicts) == 10.25


def test_the_three_outcomes_are_never_mixed_up():
    right, wrong = score(target("a", ""), 1.0), score(target("a", ""), 0.0)
    failed = error(target("a", ""), "broken")
    unreadable = exact.grade(target("exact", "x"), "")
    assert total_reward([wrong]) == 0.0
    assert total_reward([unreadable]) == 0.0
    assert unreadable.outcome is INVALID
    assert math.isnan(total_reward([failed]))
    assert math.isnan(total_reward([right, failed]))
    assert math.isnan(total_reward([]))
    assert math.isnan(total_reward([Verdict("a", SCORE, 1.0, weight=math.inf)]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.1])
def test_a_score_outside_the_range_is_an_error(value):
    verdict = score(target("a", ""), value)
    assert verdict.outcome is ERROR
    assert math.isnan(verdict.score)


def test_a_truncated_response_scores_zero():
    verdict = truncated(target("exact", "x", 2.0))
    assert (verdict.outcome, verdict.score, verdict.weight) == (SCORE, 0.0, 2.0)


async def test_every_target_of_a_prompt_is_scored_in_order():
    row = prompt(target("exact", "7", 2.0), target("number", "7", 1.0))
    verdicts = await build_verifiers().score(row, "= 7")
    assert [(each.name, each.score) for each in verdicts] == [("exact", 0.0), ("number", 1.0)]
    assert total_reward(verdicts) == 1.0


def test_an_unknown_verifier_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'nmber'.*exact, gym, number"):
        build_verifiers().require("nmber")
    with pytest.raises(ConfigurationError):
        VerifierSet({}).require("exact")
