"""Every command that the documents tell people to type, typed in their order in a run's life."""

import re
import shlex
import tempfile
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest
from command_checks import EXCEPTIONS, parsed
from documents import ROOT, commands, mentioned
from documents_reader import RUN, SECOND, Reader

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.workflow, pytest.mark.timeout(240)]


class Phase(IntEnum):
    """When a command is typed."""

    FREE = 0
    """It needs no run: typed while one starts."""
    LIVE = 1
    FINISHED = 2
    LONGER = 3
    """As before, in time for a second run to get ready."""
    STOP = 4
    """The second run goes on."""
    AFTER = 5
    """Nothing else computes."""
    AGAIN = 6
    """The finished run is taken up once more."""
    LAST = 7


FREE = ("validate", "plan", "config", "model", "version")
LIVE = ("pause", "doctor", "checkpoint", "resume")
"""Verbs that want a run that goes on, in the order in which one run can take them."""
LATER = {
    "stop": Phase.STOP,
    **dict.fromkeys(("analyze", "schedule", "evaluation"), Phase.LONGER),
    "export-hf.py": Phase.AFTER,
    **dict.fromkeys(("fork", "rewind"), Phase.AGAIN),
    "down": Phase.LAST,
}
FINISHED = ("scripts/quickstart", f"perdure start configs/recipes/{SECOND}.toml")
"""What comes first when the run shall end: it is joined and followed, and the next one starts."""
PLACEHOLDERS = {
    r"\bNAME\b": RUN,
    r"\bFILE\b": f"configs/recipes/{RUN}.toml",
    r"\bROOT\b": f"runs/{RUN}",
    r"--at UPDATES --to runs/\S+$": "--at 8 --to runs/warmer --set optimizer.learning_rate=4e-5",
    r"--to UPDATES$": '--to 8 --reason "reward fell after update 10"',
    "s3://prompts/": "prompts/",
    rf"(?<=^perdure stop ){RUN}\b": SECOND,
}


def filled(command: str) -> str:
    """The command with what stands for something replaced by it."""
    for word, value in PLACEHOLDERS.items():
        command = re.sub(word, value, command)
    return command


def exception_of(command: str) -> str | None:
    return next((reason for each, reason, _ in EXCEPTIONS if re.fullmatch(each, command)), None)


def merged() -> dict[str, list[str]]:
    """Every filled command -> where it is told."""
    found: dict[str, list[str]] = {}
    for command, places in commands().items():
        found.setdefault(filled(command), []).extend(places)
    return found


def life(command: str) -> tuple[Phase, int]:
    """When a command is typed: the phase, and the place in it."""
    words = shlex.split(command)
    verb = words[1] if words[0] in ("perdure", "python") else ""
    if command in FINISHED:
        return Phase.FINISHED, FINISHED.index(command)
    if verb in LIVE:
        return Phase.LIVE, LIVE.index(verb)
    free = not verb or verb in FREE
    return LATER.get(verb, Phase.FREE if free else Phase.FINISHED), len(FINISHED)


TOLD = merged() | {"python export-hf.py": ["docs/first-run.md"]}
CHECKED = [command for command in TOLD if exception_of(command)]
TYPED = sorted(set(TOLD) - set(CHECKED), key=lambda each: (*life(each), list(TOLD).index(each)))


SAYS = {
    f"perdure status {RUN} --verify": "train/quickstart: complete, 13 checks hold",
    f"perdure audit runs/{RUN}": "none missing, none doubled",
}
"""What the first run says that these print."""


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    # Ray's socket paths must stay below 108 characters.
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as folder:
        reader = Reader(Path(folder))
        try:
            reader.start()
            yield reader
        finally:
            reader.close()


@pytest.mark.parametrize("command", TYPED)
def test_command_is_typed(reader: Reader, command: str) -> None:
    phase, _ = life(command)
    if phase in (Phase.LIVE, Phase.STOP):
        reader.until_trained(RUN if phase is Phase.LIVE else SECOND)
    done = reader.type(re.sub(r"\bURL\b", lambda _: reader.engine_url(), command))
    told = f"{command}, told in {', '.join(TOLD[command])}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    assert SAYS.get(command, "") in done.stdout


@pytest.mark.parametrize("command", CHECKED)
def test_command_is_checked(command: str) -> None:
    (check,) = [check for pattern, _, check in EXCEPTIONS if re.fullmatch(pattern, command)]
    check(command)


def test_the_first_run_says_what_is_printed() -> None:
    page = (ROOT / "docs" / "first-run.md").read_text()
    assert all(text in page for text in SAYS.values())


def test_every_exception_is_needed() -> None:
    unused = [p for p, _, _ in EXCEPTIONS if not any(re.fullmatch(p, each) for each in TOLD)]
    assert not unused


def test_what_is_mentioned_in_passing_exists() -> None:
    wrong = {}
    for command, places in mentioned().items():
        if answer := parsed(command.partition(" > ")[0], whole=False):
            wrong[f"{command} ({', '.join(places)})"] = answer
    assert not wrong


@pytest.mark.parametrize(
    "command",
    [
        *("perdure statsu", "perdure run", "perdure run a b", "perdure wait a --jsno"),
        *("perdure analyze latency x", "perdure audit x --limit many", "perdure worker"),
    ],
)
def test_a_wrong_command_would_be_found(command: str) -> None:
    assert parsed(command)
