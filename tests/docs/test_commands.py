"""Every command that the documents tell people to type, typed in their order in a run's life."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from command_checks import EXCEPTIONS, parsed, validated, verbs
from command_life import GO_ON, NOT_YET, PLACEHOLDERS, REFUSED, SAYS, STEPS, Phase
from documents import ROOT, blocks, commands, mentioned
from documents_reader import RUN, SECOND, Reader

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.workflow, pytest.mark.timeout(240)]

MENTIONED = mentioned()
Value = TypeVar("Value")


def filled(command: str) -> str:
    """The command with what stands for something replaced by it."""
    for word, value in PLACEHOLDERS.items():
        command = re.sub(word, value, command)
    return command


def matched(table: Mapping[str, Value], command: str) -> Value | None:
    """What the table has for the command."""
    return next((value for each, value in table.items() if re.fullmatch(each, command)), None)


def told() -> dict[str, list[str]]:
    """Every filled command -> where it is told, or mentioned with all that it needs."""
    found: dict[str, list[str]] = {}
    for command, places in (commands() | MENTIONED).items():
        if not _names_a_verb(command):
            found.setdefault(filled(command), []).extend(places)
    return found


def life(command: str) -> tuple[Phase, int]:
    """When a command is typed: the phase, and the place in it."""
    for phase, patterns in STEPS.items():
        for place, pattern in enumerate(patterns):
            if re.fullmatch(pattern, command):
                return phase, place
    return Phase.FREE, 0


def _names_a_verb(command: str) -> bool:
    return command in MENTIONED and command.startswith("perdure ") and bool(parsed(command))


TOLD = told() | {"python export-hf.py": ["docs/first-run.md"]}
CHECKED = [command for command in TOLD if matched(EXCEPTIONS, command)]
TYPED = sorted(set(TOLD) - set(CHECKED), key=lambda each: (*life(each), list(TOLD).index(each)))


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    # Ray's socket paths must stay below 108 characters.
    with tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp") as folder:
        reader = Reader(Path(folder))
        try:
            reader.start()
            for command in TYPED:
                if command.startswith("perdure doctor services"):
                    reader.begin_early(command)
            yield reader
        finally:
            reader.close()


@pytest.mark.parametrize("command", TYPED)
def test_command_is_typed(reader: Reader, command: str) -> None:
    phase, _ = life(command)
    reader.turn_to(phase)
    if phase in (Phase.LIVE, Phase.STOP):
        reader.until_trained(RUN if phase is Phase.LIVE else SECOND)
    if serving := matched(GO_ON, command):
        answers(reader.begin(command).until(serving))
        return
    code, words = matched(REFUSED, command) or (0, re.escape(SAYS.get(command, "")))
    if code and shutil.which("nvidia-smi"):
        pytest.skip("is refused where no GPU is; there tests/gpu does it")
    done = reader.type(command, meanwhile=matched(NOT_YET, command))
    said = f"{command}, told in {', '.join(TOLD[command])}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == code, said
    assert re.search(words, done.stdout + done.stderr), said


def answers(serving: re.Match[str]) -> None:
    """A codec server decodes nothing to nothing for who has the token, and refuses others."""
    if address := serving.groupdict().get("url"):
        asked = {"json": {"payloads": []}, "timeout": 10}
        token = {"Authorization": f"Bearer {serving['token']}"}
        assert httpx.post(f"{address}/decode", headers=token, **asked).json() == {}
        assert httpx.post(f"{address}/decode", **asked).status_code == 401


@pytest.mark.parametrize("command", CHECKED)
def test_command_is_checked(command: str) -> None:
    exception = matched(EXCEPTIONS, command)
    assert exception is not None
    exception.check(command)


def test_the_run_file_of_the_readme_is_valid(tmp_path: Path) -> None:
    (mine,) = (each for each in blocks(ROOT / "README.md", "toml") if 'name = "mine"' in each)
    (tmp_path / "mine.toml").write_text(mine)
    assert validated(tmp_path / "mine.toml") == ""


def test_the_first_run_says_what_is_printed() -> None:
    page = (ROOT / "docs" / "first-run.md").read_text()
    assert all(text in page for text in SAYS.values())


@pytest.mark.parametrize("table", [EXCEPTIONS, GO_ON, REFUSED, NOT_YET, SAYS])
def test_no_table_has_more_than_the_documents(table: Mapping[str, object]) -> None:
    assert not [each for each in table if not any(re.fullmatch(each, told) for told in TOLD)]


def test_every_verb_is_told() -> None:
    told = [command for command in TOLD if "perdure " in command]
    assert not [verb for verb in verbs() if not any(f"perdure {verb}" in each for each in told)]


def test_verbs_that_are_mentioned_exist() -> None:
    wrong = {}
    for command in filter(_names_a_verb, MENTIONED):
        if answer := parsed(command, whole=False):
            wrong[f"{command} ({', '.join(MENTIONED[command])})"] = answer
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
