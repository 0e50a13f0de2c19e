"""Generated questions: right answers, disjoint splits, independence of the counts."""

import builtins
import re
import sys
from collections import Counter
from typing import Any

import pytest

from configs.data import TaskSpec
from models.errors import ConfigurationError
from workers.sources.tasks import Question, generate_questions

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def products(train: int, held_out: int) -> TaskSpec:
    return TaskSpec(
        task="gym:products", train_count=train, eval_count=held_out, params=dict(ONE_DIGIT)
    )


def words(train: int, held_out: int, **params: Any) -> TaskSpec:
    return TaskSpec(task="reverse_word", train_count=train, eval_count=held_out, params=params)


def factors(question: Question) -> tuple[int, int]:
    """Operands as written, read from the question's own text."""
    match = re.search(r"(\d+) \* (\d+)", question.question)
    assert match is not None
    return int(match[1]), int(match[2])


def test_reversed_words() -> None:
    questions = generate_questions(words(200, 50), 17)
    assert (len(questions.train), len(questions.held_out)) == (200, 50)
    for question in (*questions.train, *questions.held_out):
        match = re.fullmatch(r"reverse ([a-z]{5})=", question.question)
        assert match is not None
        assert question.answer == "".join(reversed(match[1]))
        assert question.extra == {}


def test_letters_are_uniform() -> None:
    train = generate_questions(words(5200, 0), 3).train
    counts = Counter(letter for question in train for letter in question.answer)
    # 26,000 letters, 1,000 expected of each, standard deviation about 31
    assert len(counts) == 26
    assert all(850 < count < 1150 for count in counts.values())


def test_seed_decides_and_repeats() -> None:
    first = generate_questions(words(64, 16), 17)
    assert first == generate_questions(words(64, 16), 17)
    assert first.train != generate_questions(words(64, 16), 18).train


@pytest.mark.parametrize("letters", [3, 5])
def test_words_are_distinct_and_disjoint(letters: int) -> None:
    questions = generate_questions(words(4096, 256, letters=letters), 17)
    train = {question.question for question in questions.train}
    held_out = {question.question for question in questions.held_out}
    assert (len(train), len(held_out)) == (4096, 256)
    assert not train & held_out


def test_counts_never_change_the_other_split_of_words() -> None:
    small = generate_questions(words(100, 10, letters=3), 17)
    more_held_out = generate_questions(words(100, 200, letters=3), 17)
    more_train = generate_questions(words(5000, 10, letters=3), 17)
    assert small.train == more_held_out.train == more_train.train[:100]
    assert small.held_out == more_train.held_out == more_held_out.held_out[:10]


def test_explicit_counts_extend_the_same_training_stream() -> None:
    task = words(100, 50, letters=3)
    longer = generate_questions(task, 17, train_count=6000)
    assert longer.train[:100] == generate_questions(task, 17).train
    held_out = {question.key for question in longer.held_out}
    assert not held_out & {question.key for question in longer.train}


def test_one_letter_is_a_small_task() -> None:
    questions = generate_questions(words(40, 6, letters=1), 17)
    held_out = {question.key for question in questions.held_out}
    train = [question.key for question in questions.train]
    assert len(held_out) == 6
    assert len(set(train[:20])) == 20
    assert sorted(train[:20]) == sorted(train[20:])
    assert train[:20] != train[20:]
    assert len(held_out | set(train)) == 26


def test_products_are_right_and_pairs_never_straddle_the_split() -> None:
    questions = generate_questions(products(400, 16), 17)
    assert (len(questions.train), len(questions.held_out)) == (400, 16)
    for question in (*questions.train, *questions.held_out):
        left, right = factors(question)
        assert question.answer == str(left * right)
        assert question.extra["metadata"]["source_dataset"] == "products"
        assert question.extra["question"] == question.question
    held_out = {frozenset(factors(question)) for question in questions.held_out}
    train = {frozenset(factors(question)) for question in questions.train}
    assert len(held_out) == 16
    assert not held_out & train
    # 55 unordered pairs of ten digits exist, and all of them are used
    assert len(train) == 55 - 16


def test_training_repeats_every_product_equally_often() -> None:
    train = generate_questions(products(39 * 4, 16), 17).train
    counts = Counter(tuple(sorted(factors(question))) for question in train)
    assert set(counts.values()) == {4}
    orders = {factors(question) for question in train}
    # both orders of a pair appear: more distinct questions than pairs
    assert len(orders) > 39


def test_counts_never_change_the_other_split_of_products() -> None:
    small = generate_questions(products(20, 5), 17)
    more_held_out = generate_questions(products(20, 30), 17)
    more_train = generate_questions(products(500, 5), 17)
    assert small.train == more_held_out.train == more_train.train[:20]
    assert small.held_out == more_train.held_out == more_held_out.held_out[:5]


@pytest.mark.parametrize("held_out", [55, 56, 1000])
def test_more_held_out_than_there_are(held_out: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"55 distinct.*eval_count = {held_out}"):
        generate_questions(products(10, held_out), 17)


def test_sums_and_divisors_ignore_operand_order() -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = TaskSpec(task="gym:chain_sum", train_count=300, eval_count=40, params=params)
    questions = generate_questions(task, 17)
    train = {question.key for question in questions.train}
    for question in questions.held_out:
        match = re.search(r"(\d+) ([+-]) (\d+)", question.question)
        assert match is not None
        left, sign, right = match.groups()
        twin = f"{right} + {left}" if sign == "+" else None
        texts = {f" {other} " for other in train}
        assert f" {left} {sign} {right} " not in texts
        assert twin is None or f" {twin} " not in texts
    gcd = TaskSpec(
        task="gym:gcd", train_count=100, eval_count=10, params={"min_value": 2, "max_value": 9}
    )
    divisors = generate_questions(gcd, 17)
    pairs = [
        {frozenset(question.extra["metadata"]["numbers"]) for question in split}
        for split in (divisors.train, divisors.held_out)
    ]
    assert not pairs[0] & pairs[1]


def test_generator_without_a_single_answer() -> None:
    task = TaskSpec(task="gym:rubiks_cube", train_count=2, eval_count=1)
    questions = generate_questions(task, 17)
    assert {question.answer for question in questions.train} == {""}
    assert questions.train[0].extra["metadata"]["source_dataset"] == "rubiks_cube"


@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("reverse_words", {}, "unknown task 'reverse_words'"),
        ("gym:product", {}, "did you mean products"),
        ("gym:products", {"min_digit": 1}, "min_digit"),
        ("gym:products", {"min_terms": 0}, "min_terms must be positive"),
        ("gym:products", {"seed": 1}, r"params\.seed"),
        ("reverse_word", {"length": 5}, "no parameter 'length'"),
        ("reverse_word", {"letters": 0}, "letters"),
        ("reverse_word", {"letters": "5"}, "letters"),
        ("reverse_word", {"letters": True}, "letters"),
    ],
)
def test_wrong_tasks_are_refused(task: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        generate_questions(TaskSpec(task=task, train_count=1, params=params), 17)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_gym(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "reasoning_gym":
            raise ModuleNotFoundError("No module named 'reasoning_gym'")
        return real_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_gym)
    with pytest.raises(ConfigurationError, match=r"perdure\[gym\]"):
        generate_questions(products(1, 0), 17)
