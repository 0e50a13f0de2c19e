"""What the documents tell people: commands to type, links to follow, code to copy."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^\s*```(\w*)")
COMMENT = re.compile(r"\s+#\s.*$")
CODE = re.compile(r"`([^`]+)`")
MENTIONED = re.compile(r"(\w+=\S+ )*((perdure|poe|docker|python) |scripts/|\. |temporal .* -)")
"""Begin of a command in running text; ``temporal`` with verbs alone names a command."""
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a document, and the language of the code block around it (none: prose)."""

    place: str
    text: str
    language: str | None = None


def documents() -> list[Path]:
    """What people read: the two at the top and everything in ``docs``."""
    names = ("README.md", "CONTRIBUTING.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").glob("*.md"))]


def lines(document: Path) -> Iterator[Line]:
    """Every line but the fences."""
    name, language = document.relative_to(ROOT).as_posix(), None
    for number, text in enumerate(document.read_text().splitlines(), 1):
        if fence := FENCE.match(text):
            language = (fence[1] or "text") if language is None else None
        else:
            yield Line(f"{name}:{number}", text, language)


def commands() -> dict[str, list[str]]:
    """Every command that a document tells to type -> where; comments are cut off.

    These are the lines ``$ ...`` of console blocks, and what stands in the column ``command`` of a
    table and begins with ``perdure``.
    """
    found: dict[str, list[str]] = {}
    for document in documents():
        for place, command in (*_console(document), *_columns(document)):
            found.setdefault(command, []).append(place)
    return found


def mentioned() -> dict[str, list[str]]:
    """Every other command in running text -> where; it may go on in the next line.

    Verbs without their arguments are among them.
    """
    found: dict[str, list[str]] = {}
    told = commands()
    for document in documents():
        name = document.relative_to(ROOT).as_posix()
        prose = "\n".join(_prose(document))
        for code in CODE.finditer(prose):
            command = " ".join(code[1].split())
            if MENTIONED.match(command) and command not in told:
                line = prose.count("\n", 0, code.start()) + 1
                found.setdefault(command, []).append(f"{name}:{line}")
    return found


def blocks(document: Path, language: str) -> list[str]:
    """The code blocks of one language, in order."""
    text = document.read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """What can be linked to in a document: its headings as GitHub names them."""
    found: set[str] = set()
    for line in lines(document):
        if line.language is None and (heading := HEADING.match(line.text)):
            slug = re.sub(r"[^\w\- ]", "", heading[1].lower()).strip().replace(" ", "-")
            taken = sum(1 for each in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", each))
            found.add(f"{slug}-{taken}" if taken else slug)
    return found


def links(document: Path) -> Iterator[tuple[str, str]]:
    """(place, target) of every link that leads to a file or an anchor of the project."""
    for line in lines(document):
        if line.language is None:
            for target in LINK.findall(line.text):
                if "://" not in target:
                    yield line.place, target


def _prose(document: Path) -> Iterator[str]:
    """Every line of a document; nothing stands for a line of a code block."""
    inside = False
    for text in document.read_text().splitlines():
        fence = FENCE.match(text) is not None
        yield "" if inside or fence else text
        inside ^= fence


def _console(document: Path) -> Iterator[tuple[str, str]]:
    whole = ""
    for line in lines(document):
        if line.language != "console" or not (whole or line.text.startswith("$ ")):
            continue
        whole += line.text.removeprefix("$ ") if not whole else " " + line.text.strip()
        if whole.endswith("\\"):
            whole = whole.removesuffix("\\").rstrip()
        else:
            yield line.place, COMMENT.sub("", whole).strip()
            whole = ""


def _columns(document: Path) -> Iterator[tuple[str, str]]:
    column: int | None = None
    for line in lines(document):
        if line.language is not None or not line.text.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.text)[1:-1]]
        if "command" in cells:
            column = cells.index("command")
        elif column is not None:
            for code in CODE.findall(cells[column]):
                if code.startswith("perdure "):
                    yield line.place, code
