"""Links between documents: every file and every heading is there, every page is in the index."""

import re

from documents import ROOT, anchors, documents, links


def test_links_and_anchors_resolve() -> None:
    pages = [*documents(), ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "RESULTS.md"]
    pages += sorted((ROOT / "docs" / "adr").glob("*.md"))
    broken, seen = [], 0
    for page in pages:
        for place, target in links(page):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            whole = file.exists() and (not anchor or anchor in anchors(file))
            seen += 1
            if not whole:
                broken.append(f"{place}: {target}")
    assert seen > 60
    assert not broken


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    told = set(re.findall(r"\]\(([\w.-]+\.md)\)", index))
    assert told == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


def test_headings_are_named_as_on_github() -> None:
    """As its own documentation shows: lower case, punctuation gone, spaces become hyphens."""
    names = anchors(ROOT / "docs" / "operations.md")
    assert {"what-status-shows-of-one-run", "establish-completion"} <= names
    assert "model" in anchors(ROOT / "docs" / "configuration.md")
    assert "modeltiny" in anchors(ROOT / "docs" / "configuration.md")
