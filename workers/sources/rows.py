"""Source rows: what a prompt is before the tokenizer sees it, from tasks or from JSONL.

A JSONL record holds one of ``prompt``, ``question`` (text) and ``messages`` (a chat), one of
``answer``, ``ground_truth`` and ``label``, optionally ``verifier`` and ``extra`` (an object for the
verifier). Other fields are ignored: public data sets carry many. Records end at LF only; U+2028,
U+2029 and U+0085 are content.
"""

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

from activities.verifiers.number import count_numbers
from activities.verifiers.registry import REGISTRY
from configs.data import DataSection, TaskSpec
from models.errors import ConfigurationError
from workers.sources.tasks import GYM_PREFIX, Question, generate_questions

_PROMPT_KEYS = ("prompt", "question", "messages")
_ANSWER_KEYS = ("answer", "ground_truth", "label")
_ROLES = ("system", "user", "assistant")
_GYM_ENTRY_KEYS = frozenset(("question", "answer", "metadata"))
_FINAL_ANSWER = "####"
"""In worked solutions the number that counts follows this."""
_NUMBER = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One prompt before rendering."""

    source: str
    """Task name, or the data file's name."""
    source_row: int
    """0-based within its task, or within its file's records."""
    where: str
    """For messages: ``FILE line N`` or ``TASK question N``, 1-based."""
    messages: tuple[dict[str, str], ...]
    """Chat turns {role, content}, the last one the user's."""
    label: str
    verifier: str
    extra: dict[str, Any] = field(default_factory=dict)
    """For the verifier; the gym verifier wants a generator's entry here."""

    @property
    def query(self) -> str:
        """The last user text."""
        return self.messages[-1]["content"]


def task_rows(data: DataSection) -> tuple[list[SourceRow], list[SourceRow]]:
    """Train and held-out rows of ``data.tasks``.

    The training rows of several tasks are mixed by the seed when ``data.shuffle`` is on.
    """
    train: list[SourceRow] = []
    held_out: list[SourceRow] = []
    for task in data.tasks:
        questions = generate_questions(task, data.seed)
        train.extend(_task_row(task, index, q) for index, q in enumerate(questions.train))
        held_out.extend(_task_row(task, index, q) for index, q in enumerate(questions.held_out))
    if data.shuffle and len(data.tasks) > 1:
        random.Random(f"{data.seed}:train").shuffle(train)
    return train, held_out


def jsonl_rows(name: str, content: bytes, verifier: str) -> list[SourceRow]:
    """Rows of a JSONL file; blank lines are skipped.

    Args:
        name: path or URL, for messages.
        content: the file's bytes, UTF-8, with or without a byte-order mark.
        verifier: of rows that name none.

    Raises:
        ConfigurationError: naming the file and the 1-based line; a file without records.
    """
    source = name.rsplit("/", 1)[-1]
    rows: list[SourceRow] = []
    for line, record in _records(name, content):
        where = f"{name} line {line}"
        extra = record.get("extra")
        row = SourceRow(
            source=source,
            source_row=len(rows),
            where=where,
            messages=_messages(record, where),
            label=_label(record, where),
            verifier=_text(record.get("verifier", verifier), "verifier", where),
            extra=extra if isinstance(extra, dict) else {},
        )
        _check_target(row)
        rows.append(row)
    if not rows:
        raise ConfigurationError(f"{name}: no records; a JSONL file holds one JSON object a line")
    return rows


def _task_row(task: TaskSpec, index: int, question: Question) -> SourceRow:
    row = SourceRow(
        source=task.task,
        source_row=index,
        where=f"{task.task} question {index + 1}",
        messages=({"role": "user", "content": question.question + task.prompt_suffix},),
        label=question.answer,
        verifier=task.verifier or _default_verifier(task, question),
        extra=question.extra,
    )
    _check_target(row)
    return row


def _default_verifier(task: TaskSpec, question: Question) -> str:
    if not task.task.startswith(GYM_PREFIX):
        return "exact"
    return "number" if _NUMBER.fullmatch(question.answer) else "gym"


def _check_target(row: SourceRow) -> None:
    """Refuse a row that its verifier could never score."""
    if row.verifier not in REGISTRY:
        known = ", ".join(sorted(REGISTRY))
        _refuse(row.where, f"unknown verifier {row.verifier!r}; registered are {known}")
    if row.verifier == "number":
        found = count_numbers(row.label.rpartition(_FINAL_ANSWER)[2])
        if found != 1:
            _refuse(
                row.where,
                f"the number verifier needs a number as answer, one alone, not {row.label!r}; "
                f"reasoning may stand before {_FINAL_ANSWER}",
            )
    if row.verifier == "exact" and not row.label.strip():
        _refuse(row.where, "the exact verifier needs a non-empty answer")
    if row.verifier in ("code", "code_stdio"):
        _check_tests(row)
    if row.verifier == "gym" and not row.extra.keys() >= _GYM_ENTRY_KEYS:
        _refuse(row.where, "the gym verifier needs the generator's whole entry in 'extra'")


def _check_tests(row: SourceRow) -> None:
    from activities.verifiers.code import FUNCTION, STDIO, parse_tests  # httpx is slow to import

    tests = parse_tests(row.label, STDIO if row.verifier == "code_stdio" else FUNCTION)
    if isinstance(tests, str):
        _refuse(row.where, f"{row.verifier}: {tests}")


def _records(name: str, content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """(1-based line, parsed object) of every line that is not blank."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        where = f"{name} line {number}"
        try:
            record = json.loads(raw.decode(), parse_constant=_not_json)
        except UnicodeDecodeError as error:
            _refuse(where, f"not UTF-8: {error}")
        except ValueError as error:
            _refuse(where, f"malformed JSON: {error}")
        if not isinstance(record, dict):
            _refuse(where, f"expected an object, found {type(record).__name__}")
        yield number, record


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _messages(record: dict[str, Any], where: str) -> tuple[dict[str, str], ...]:
    key = _only_key(record, _PROMPT_KEYS, "prompt", where)
    if key != "messages":
        return ({"role": "user", "content": _text(record[key], key, where)},)
    turns = record[key]
    if not isinstance(turns, list) or not turns:
        _refuse(where, "messages must be a non-empty list of {role, content}")
    messages: list[dict[str, str]] = []
    for turn in turns:
        if not isinstance(turn, dict) or turn.get("role") not in _ROLES:
            _refuse(where, f"every message needs a role out of {', '.join(_ROLES)}")
        content = _text(turn.get("content"), "message content", where)
        messages.append({"role": turn["role"], "content": content})
    if messages[-1]["role"] != "user":
        _refuse(where, "the last message must be the user's; put the reference into 'answer'")
    return tuple(messages)


def _label(record: dict[str, Any], where: str) -> str:
    key = _only_key(record, _ANSWER_KEYS, "answer", where)
    value = record[key]
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(where, f"{key} is not a finite number")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format(Decimal(str(value)), "f")  # 1e-05 as text would read as two numbers
    return _text(value, key, where)


def _only_key(record: dict[str, Any], keys: Sequence[str], what: str, where: str) -> str:
    present = [key for key in keys if record.get(key) is not None]
    if len(present) == 1:
        return present[0]
    found = f"found {' and '.join(present)}" if present else "found none"
    _refuse(where, f"needs exactly one of {', '.join(keys)} for its {what}, {found}")


def _text(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str):
        _refuse(where, f"{what} must be text, not {type(value).__name__}")
    if not value.strip():
        _refuse(where, f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        _refuse(where, f"{what} holds half a surrogate pair: {error}")
    return value


def _refuse(where: str, reason: str) -> NoReturn:
    raise ConfigurationError(f"{where}: {reason}")
