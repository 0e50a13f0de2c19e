"""``docs/triage.md`` quotes messages: each of them is one that the code can really print."""

import ast
import re
from functools import cache

from documents import ROOT, lines

from models.errors import all_errors

PAGE = ROOT / "docs" / "triage.md"
PACKAGES = ("models", "configs", "activities", "workflows", "workers")
HOLE = "\0"
"""Stands for what a message fills in."""


@cache
def messages() -> list[str]:
    """Every text of the source, with a hole for each value."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else HOLE for p in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def quoted() -> list[tuple[str, str]]:
    """(place, message) of the first column of every table of symptoms."""
    found, in_symptoms = [], False
    for line in lines(PAGE):
        cells = line.text.split("|")
        if len(cells) < 3:
            in_symptoms = False
        elif cells[1].strip() == "symptom":
            in_symptoms = True
        elif in_symptoms:
            found += [(line.place, quote) for quote in re.findall(r"`([^`]+)`", cells[1])]
    return found


def is_printed(quote: str) -> bool:
    """Whether one message holds the parts of the quote in their order."""
    parts = [part.strip() for part in quote.split("\N{HORIZONTAL ELLIPSIS}")]
    wanted = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(wanted.search(message) for message in messages())


def test_every_quoted_message_is_in_the_source() -> None:
    errors = {error.type_name() for error in all_errors()}
    assert len(quoted()) > 40
    invented = [each for each in quoted() if each[1] not in errors and not is_printed(each[1])]
    assert not invented


def test_an_invented_message_would_be_found() -> None:
    assert not is_printed("the engine is on fire")
    assert not is_printed("recorded SHA-256 \N{HORIZONTAL ELLIPSIS}, lost \N{HORIZONTAL ELLIPSIS}")
    assert is_printed("recorded SHA-256 \N{HORIZONTAL ELLIPSIS}, found \N{HORIZONTAL ELLIPSIS}")
