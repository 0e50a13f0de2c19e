"""JSONL source rows: each malformed record is refused with file and line."""

import pytest

from models.errors import ConfigurationError
from workers.sources.rows import jsonl_rows

GOOD = '{"prompt": "p", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + '\n{"prompt": "x", "answer"}\n', r"train\.jsonl line 3: malformed JSON"),
        (GOOD + '["p", "a"]\n', r"line 2: expected an object, found list"),
        ('{"prompt": "p"}\n', r"line 1: needs exactly one of answer.*found none"),
        ('{"answer": "p"}\n', r"line 1: needs exactly one of prompt.*found none"),
        (
            '{"prompt": "p", "question": "q", "answer": "a"}\n',
            r"line 1: .*found prompt and question",
        ),
        ('{"prompt": " ", "answer": "a"}\n', r"line 1: prompt is empty"),
        ('{"prompt": 5, "answer": "a"}\n', r"line 1: prompt must be text, not int"),
        ('{"prompt": "p", "answer": true}\n', r"line 1: answer must be text, not bool"),
        ('{"prompt": "p", "answer": NaN}\n', r"line 1: malformed JSON: NaN"),
        ('{"prompt": "p", "answer": 1e999}\n', r"line 1: answer is not a finite number"),
        ('{"prompt": "\\ud800", "answer": "a"}\n', r"line 1: prompt holds half a surrogate"),
        ('{"prompt": "p", "answer": "a", "verifier": "exakt"}\n', r"unknown verifier 'exakt'"),
        ('{"prompt": "p", "answer": "a", "verifier": "number"}\n', r"needs a number.*'a'"),
        ('{"prompt": "p", "answer": "3/4", "verifier": "number"}\n', r"one alone, not '3/4'"),
        ('{"prompt": "p", "answer": "1e-5", "verifier": "number"}\n', r"one alone, not '1e-5'"),
        ('{"prompt": "p", "answer": "a", "verifier": "gym"}\n', r"whole entry"),
        ('{"messages": [], "answer": "a"}\n', r"non-empty list"),
        ('{"messages": [{"role": "tool", "content": "x"}], "answer": "a"}\n', r"role out of"),
        (
            '{"messages": [{"role": "user", "content": "x"}, '
            '{"role": "assistant", "content": "y"}], "answer": "a"}\n',
            r"last message must be the user's",
        ),
        (GOOD.encode() + b'{"prompt": "\xff", "answer": "a"}\n', r"line 2: not UTF-8"),
    ],
)
def test_bad_record_names_file_and_line(content: str | bytes, message: str) -> None:
    data = content.encode() if isinstance(content, str) else content
    with pytest.raises(ConfigurationError, match=message):
        jsonl_rows("/data/train.jsonl", data, "exact")


def test_rows_without_a_verifier_take_the_default() -> None:
    content = b'{"prompt": "p", "answer": 7}\n{"prompt": "q", "answer": 8, "verifier": "exact"}\n'
    rows = jsonl_rows("s3://bucket/train.jsonl", content, "number")
    assert [(row.source, row.source_row, row.verifier, row.label) for row in rows] == [
        ("train.jsonl", 0, "number", "7"),
        ("train.jsonl", 1, "exact", "8"),
    ]


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("0.00001", "0.00001"),
        ("1e-5", "0.00001"),
        ("2.50", "2.5"),
        ("1e22", "10000000000000000000000"),
        ("-7", "-7"),
        ('"10 apples"', "10 apples"),
        ('"16 - 3 - 4 = 9 eggs\\n#### 9"', "16 - 3 - 4 = 9 eggs\n#### 9"),
    ],
)
def test_number_answers_keep_their_value(answer: str, label: str) -> None:
    (row,) = jsonl_rows("t.jsonl", f'{{"prompt": "p", "answer": {answer}}}\n'.encode(), "number")
    assert row.label == label
