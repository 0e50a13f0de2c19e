"""Generated questions: ``reverse_word`` and every reasoning-gym generator as ``gym:NAME``.

Train and held-out questions are disjoint by question key, and the key of a commutative question
ignores operand order, so 3 x 4 and 4 x 3 never straddle the split. A task is an endless stream that
depends on (task, seed, params) only; the counts asked for never change the stream. Two cases:

- *Small* (half of the first 512 draws repeat a key, for example one-digit products): all keys are
  collected and shuffled by seed. Held-out questions take keys from the back, one question a key;
  training takes them from the front. When ``train_count`` exceeds the keys that are left, training
  goes through them again in a new order, with another wording or operand order of the same key
  where there is one. Changing one count never changes what the other split holds, as long as
  ``eval_count`` + ``train_count`` keys exist.
- *Open*: a hash of (seed, key) sends a quarter of the keys to the held-out side and the rest to the
  training side; each split takes the first distinct keys of its side. Changing one count never
  changes the other split.
"""

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from configs.data import TaskSpec
from models.errors import ConfigurationError
from workers.sources.gym import gym_entries, gym_key

GYM_PREFIX = "gym:"
REVERSE_WORD = "reverse_word"

_PROBE_DRAWS = 512
# A task small enough to matter repeats a key far more often than this many draws can hide; slow
# generators (tens of milliseconds a question) are spared the longer probe.
_FIRST_DRAWS = 128
_HELD_OUT_SHARE = 0.25
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MAX_LETTERS = 64
_DRAWS_PER_QUESTION = 40


@dataclass(frozen=True, slots=True)
class Question:
    """One generated question. ``key`` decides on which side of the split it is."""

    question: str
    answer: str
    """Empty where a reasoning-gym generator has no single right answer."""
    key: str
    extra: dict[str, Any] = field(default_factory=dict)
    """A reasoning-gym entry (question, answer, metadata), for the gym verifier; else empty."""


@dataclass(frozen=True, slots=True)
class TaskQuestions:
    """Both splits of one task; their keys are disjoint."""

    train: list[Question]
    held_out: list[Question]


def generate_questions(
    task: TaskSpec, seed: int, train_count: int | None = None, eval_count: int | None = None
) -> TaskQuestions:
    """Draw the splits of ``task``; counts default to the task's own.

    Raises ``ConfigurationError`` for an unknown task, wrong parameters, a generator that is not
    installed, or more held-out questions than there are.
    """
    wanted_train = task.train_count if train_count is None else train_count
    wanted_eval = task.eval_count if eval_count is None else eval_count
    stream = _stream(task, seed)
    probe = list(itertools.islice(stream, _FIRST_DRAWS))
    if _distinct(probe) < 0.9 * len(probe):
        probe.extend(itertools.islice(stream, _PROBE_DRAWS - _FIRST_DRAWS))
    split = _split_small if 2 * _distinct(probe) <= len(probe) else _split_open
    return split(task, seed, itertools.chain(probe, stream), wanted_train, wanted_eval)


def first_question(task: TaskSpec, seed: int) -> Question:
    """One question: whether the generator is there and takes ``task.params``.

    Raises ``ConfigurationError`` as ``generate_questions`` does.
    """
    return next(_stream(task, seed))


def _distinct(questions: Iterable[Question]) -> int:
    return len({question.key for question in questions})


def _stream(task: TaskSpec, seed: int) -> Iterator[Question]:
    """Endless questions of ``task``, a function of (task, seed, params)."""
    if task.task == REVERSE_WORD:
        return _reversed_words(_letters(task.params), seed)
    if task.task.startswith(GYM_PREFIX):
        name = task.task.removeprefix(GYM_PREFIX)
        stream_seed = random.Random(f"{seed}:{task.task}").getrandbits(31)
        entries = gym_entries(name, stream_seed, task.params)
        return (
            Question(entry["question"], _answer(entry), gym_key(name, entry), entry)
            for entry in entries
        )
    raise ConfigurationError(
        f"data.tasks: unknown task {task.task!r}; use {REVERSE_WORD!r} or {GYM_PREFIX + 'NAME'!r} "
        "with the name of a reasoning-gym generator, for example 'gym:products'"
    )


def _answer(entry: dict[str, Any]) -> str:
    return "" if entry["answer"] is None else str(entry["answer"])


def _letters(params: dict[str, Any]) -> int:
    unknown = sorted(set(params) - {"letters"})
    if unknown:
        raise ConfigurationError(
            f"data.tasks: {REVERSE_WORD} has no parameter {unknown[0]!r}; it knows 'letters'"
        )
    letters = params.get("letters", 5)
    if type(letters) is not int or not 1 <= letters <= _MAX_LETTERS:
        raise ConfigurationError(
            f"data.tasks: {REVERSE_WORD} params.letters must be an integer from 1 to "
            f"{_MAX_LETTERS}, not {letters!r}"
        )
    return letters


def _reversed_words(letters: int, seed: int) -> Iterator[Question]:
    rng = random.Random(f"{seed}:{REVERSE_WORD}:{letters}")
    while True:
        word = "".join(rng.choices(_LETTERS, k=letters))
        yield Question(f"reverse {word}=", word[::-1], word)


def _split_small(
    task: TaskSpec, seed: int, stream: Iterable[Question], train_count: int, eval_count: int
) -> TaskQuestions:
    variants = _collect(stream)
    keys = sorted(variants)
    random.Random(f"{seed}:{task.task}:keys").shuffle(keys)
    left = len(keys) - eval_count
    if left < 0 or (left == 0 and train_count > 0):
        raise ConfigurationError(
            f"data.tasks: {task.task} holds {len(keys)} distinct questions with these params; "
            f"eval_count = {eval_count} leaves none to train on, lower it or widen params"
        )
    held_out = [variants[key][0] for key in reversed(keys[left:])]
    train: list[Question] = []
    for turn in itertools.count():
        if len(train) >= train_count:
            return TaskQuestions(train[:train_count], held_out)
        order = keys[:left]
        if turn > 0:
            random.Random(f"{seed}:{task.task}:turn:{turn}").shuffle(order)
        train.extend(variants[key][turn % len(variants[key])] for key in order)
    raise AssertionError("unreachable: the loop above returns")


def _collect(stream: Iterable[Question]) -> dict[str, list[Question]]:
    """Every key with its distinct questions, until ten times as many draws bring nothing new."""
    variants: dict[str, list[Question]] = {}
    idle = 0
    for question in stream:
        known = variants.setdefault(question.key, [])
        if any(question.question == other.question for other in known):
            idle += 1
        else:
            known.append(question)
            idle = 0
        if idle >= max(_PROBE_DRAWS, 10 * len(variants)):
            break
    return variants


def _split_open(
    task: TaskSpec, seed: int, stream: Iterable[Question], train_count: int, eval_count: int
) -> TaskQuestions:
    train: dict[str, Question] = {}
    held_out: dict[str, Question] = {}
    limit = _PROBE_DRAWS + _DRAWS_PER_QUESTION * (train_count + eval_count)
    for question in itertools.islice(stream, limit):
        if len(train) >= train_count and len(held_out) >= eval_count:
            break
        is_held_out = _rank(seed, task.task, question.key) < _HELD_OUT_SHARE
        side, wanted = (held_out, eval_count) if is_held_out else (train, train_count)
        if len(side) < wanted:
            side.setdefault(question.key, question)
    if len(held_out) < eval_count:
        raise ConfigurationError(
            f"data.tasks: {task.task} yielded {len(held_out)} distinct held-out questions with "
            f"these params; eval_count = {eval_count} is too many, lower it or widen params"
        )
    return TaskQuestions(_repeated(list(train.values()), train_count), list(held_out.values()))


def _repeated(questions: list[Question], count: int) -> list[Question]:
    """``count`` questions, from the start again where there are fewer distinct ones."""
    return list(itertools.islice(itertools.cycle(questions), count))


def _rank(seed: int, task: str, key: str) -> float:
    """A uniform number in [0, 1) that depends on its arguments only."""
    digest = hashlib.sha256(f"{seed}:{task}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
