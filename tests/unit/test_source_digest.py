import hashlib
import importlib
from pathlib import Path

from workers.source_digest import PACKAGES, digest_sources, package_folders, source_digest


def tree(root: Path) -> dict[str, Path]:
    (root / "alpha" / "inner").mkdir(parents=True)
    (root / "beta").mkdir()
    (root / "alpha" / "__init__.py").write_text("A = 1\n")
    (root / "alpha" / "inner" / "deep.py").write_text("B = 2\n")
    (root / "beta" / "__init__.py").write_text("")
    return {"beta": root / "beta", "alpha": root / "alpha"}


def test_digest_is_over_sorted_names_and_contents(tmp_path: Path):
    def line(name: str, content: bytes) -> bytes:
        return f"{name} {hashlib.sha256(content).hexdigest()}\n".encode()

    expected = hashlib.sha256(
        line("alpha/__init__.py", b"A = 1\n")
        + line("alpha/inner/deep.py", b"B = 2\n")
        + line("beta/__init__.py", b"")
    ).hexdigest()

    assert digest_sources(tree(tmp_path)) == expected


def test_content_name_and_presence_of_a_source_change_the_digest(tmp_path: Path):
    folders = tree(tmp_path)
    seen = {digest_sources(folders)}
    deep = tmp_path / "alpha" / "inner" / "deep.py"

    deep.write_text("B = 3\n")
    seen.add(digest_sources(folders))
    deep.rename(deep.with_name("other.py"))
    seen.add(digest_sources(folders))
    (tmp_path / "beta" / "more.py").write_text("")
    seen.add(digest_sources(folders))

    assert len(seen) == 4


def test_files_that_are_not_sources_do_not_count(tmp_path: Path):
    folders = tree(tmp_path)
    before = digest_sources(folders)
    (tmp_path / "alpha" / "__pycache__").mkdir()
    (tmp_path / "alpha" / "__pycache__" / "deep.pyc").write_bytes(b"x")
    (tmp_path / "beta" / "recipe.toml").write_text("a = 1\n")

    assert digest_sources(folders) == before


def test_this_process_reports_the_packages_that_it_imports():
    folders = package_folders()

    assert tuple(sorted(folders)) == PACKAGES
    for name, folder in folders.items():
        assert Path(importlib.import_module(name).__file__ or "").parent == folder
    version, _, digest = source_digest().partition("+")
    assert version
    assert digest == digest_sources(folders)[:16]
