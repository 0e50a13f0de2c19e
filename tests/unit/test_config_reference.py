"""``docs/configuration.md``: current, whole, and true to what a run file is taken to mean."""

import json
import re
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from configs.hints import keys_of, leaf_keys, section_at
from configs.reference import reference
from workers.cli.app import run_command

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.+) \|$", re.MULTILINE)


def rows_of(page: str) -> dict[str, tuple[str, str, str]]:
    """Dotted key -> (value, default, meaning), as a reader sees them."""
    found = {}
    _, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    for section in sections:
        title = section.partition("\n")[0]
        table = "" if title.startswith("Outside") else title.strip("`[]") + "."
        for key, *cells in ROW.findall(section):
            found[table + key] = tuple(cells)
    return found


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text() == reference(), "run `poe reference`"


def test_every_key_has_a_row_with_its_default() -> None:
    rows = rows_of(PAGE.read_text())
    assert set(rows) == set(leaf_keys())
    for key, (_, default, meaning) in rows.items():
        *table, name = key.split(".")
        section = section_at(table)
        assert section is not None
        field = keys_of(section)[name]
        if field.is_required():
            assert default == "**required**", key
        elif field.default is None:
            assert default == "", key
        else:
            made = field.default if field.default is not PydanticUndefined else {}
            assert json.loads(default.strip("`")) == made, key
        assert meaning.strip(), key


def test_choices_and_ranges_are_those_that_loading_enforces() -> None:
    rows = rows_of(PAGE.read_text())
    assert rows["core.publication_mode"][0] == '`"barrier"`, `"refresh"`, `"rolling"`'
    assert rows["inference.top_p"][0] == "number, above 0, at most 1"
    assert rows["training.num_rollouts"][0] == "integer, at least 1"
    assert rows["async.fully_async"][0] == "true or false"
    assert "\\|" in rows["data.prompt_data"][2]  # a bare bar would end the cell


def test_the_command_prints_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["config", "reference"]) == 0
    assert capsys.readouterr().out == PAGE.read_text()
    assert run_command(["config", "reference", "--write", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()
