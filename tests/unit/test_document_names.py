"""Names in the documents are names in the code, and numbers were measured."""

import re
from collections.abc import Iterator
from pathlib import Path

from documents import CODE, ROOT, documents, lines

from configs.hints import leaf_keys, tables

KEYS = {*leaf_keys(), *(path for path, _ in tables())}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
FOLDERS = ("models", "configs", "activities", "workflows", "workers")
BESIDE = ("benchmarks", "deploy", "docs", "scripts", "tests")
MADE_BY_THE_READER = ("deploy/worker.env", "deploy/secrets/", "activities/verifiers/contains.py")


def told() -> Iterator[tuple[str, str]]:
    """(place, code) of every name in running text."""
    for document in documents():
        for line in lines(document):
            if line.language is None:
                for code in CODE.findall(line.text):
                    yield line.place, code


def test_keys_exist() -> None:
    named = re.compile(rf"((?:{'|'.join(SECTIONS)})\.[a-z_.]+)(?: = .*)?")
    found = [(place, match[1]) for place, code in told() if (match := named.fullmatch(code))]
    assert len(found) > 100
    wrong = [each for each in found if each[1] not in KEYS and not _is_file(each[1])]
    assert not wrong


def test_variables_are_read_somewhere() -> None:
    texts = [path.read_text() for folder in (*FOLDERS, "scripts", "deploy") for path in _in(folder)]
    texts += [(ROOT / name).read_text() for name in ("docker-compose.yml", "Dockerfile")]
    source = "\n".join(texts)
    named = re.compile(r"([A-Z][A-Z0-9]*_[A-Z0-9_]+)(?:=.*)?")
    found = [(place, match[1]) for place, code in told() if (match := named.fullmatch(code))]
    assert len(found) > 30
    assert not [each for each in found if each[1] not in source]


def test_files_exist() -> None:
    named = re.compile(rf"(?:{'|'.join((*FOLDERS, *BESIDE))})/[\w./-]+")
    found = [(place, code) for place, code in told() if named.fullmatch(code)]
    assert len(found) > 30
    wrong = [
        each
        for each in found
        if not (ROOT / each[1]).exists()
        and "NAME" not in each[1]
        and not each[1].startswith(MADE_BY_THE_READER)
    ]
    assert not wrong


def test_numbers_of_the_questions_were_measured() -> None:
    """Each number of three digits in the FAQ stands in the file of measurements."""
    measured = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    page = (ROOT / "docs" / "faq.md").read_text()
    numbers = re.findall(r"(?<![\w.])\d[\d,]*\d(?:\.\d+)?|(?<![\w.])\d\.\d+(?:e-\d)?", page)
    found = [number for number in numbers if len(re.sub(r"\D", "", number)) >= 3]
    assert len(found) > 20
    assert not [number for number in found if number not in measured]


def _is_file(name: str) -> bool:
    return name.endswith((".safetensors", ".json", ".jsonl", ".toml", ".py"))


def _in(folder: str) -> list[Path]:
    kinds = (".py", ".sh", ".json", ".example", ".toml", ".yml", "")
    return [
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in kinds and "__pycache__" not in path.parts
    ]
