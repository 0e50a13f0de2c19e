"""Which code runs: one digest of the five packages' sources, compared between processes.

Ray puts a driver's working directory in front of the installed packages of its workers, so an actor
may import another copy than the process that made it. Both sides report this digest.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("activities", "configs", "models", "workers", "workflows")
DISTRIBUTION = "perdure"


@functools.cache
def source_digest() -> str:
    """``<version>+<16 hex>`` of the code that this process imports; computed once.

    Raises:
        ModuleNotFoundError: one of the packages is not importable.
    """
    return f"{_version()}+{digest_sources(package_folders())[:16]}"


def package_folders() -> dict[str, Path]:
    """Package name -> the folder that this process imports it from."""
    return {name: _folder(name) for name in PACKAGES}


def digest_sources(folders: dict[str, Path]) -> str:
    """SHA-256 hex over name and bytes of every ``*.py`` file below ``folders``, in name order."""
    digest = hashlib.sha256()
    for package in sorted(folders):
        for path in _sources(folders[package]):
            name = f"{package}/{path.relative_to(folders[package]).as_posix()}"
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()


def _sources(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*.py") if path.is_file())


def _folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package {name!r} of {DISTRIBUTION} is not importable")
    return Path(spec.submodule_search_locations[0]).resolve()


def _version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0"
