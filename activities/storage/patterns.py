"""Files behind a pattern, wherever fsspec reaches: what is there, how long, and its content."""

from dataclasses import dataclass
from pathlib import PurePosixPath

import fsspec

from activities.storage.objects import answers
from models.errors import ConfigurationError, ServiceUnreachable


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One file that a pattern names."""

    url: str
    """Absolute path of a local file, else its URL."""
    num_bytes: int


def find_files(pattern: str) -> list[FoundFile]:
    """Files that ``pattern`` names, by address; hidden ones are left out: they may be half written.

    Raises:
        ConfigurationError: the scheme is unknown or its package is not installed.
        ServiceUnreachable: the storage did not answer.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(pattern, use_listings_cache=False)
        with answers(pattern):
            entries = filesystem.glob(path, detail=True)
    except (ImportError, ValueError, PermissionError) as error:
        raise ConfigurationError(f"data pattern {pattern!r}: {error}") from error
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ServiceUnreachable(f"data pattern {pattern!r}: {error}") from error
    local = "file" in _protocols(filesystem)
    found = [
        FoundFile(name if local else str(filesystem.unstrip_protocol(name)), int(entry["size"]))
        for name, entry in entries.items()
        if entry["type"] == "file" and not _is_hidden(name)
    ]
    return sorted(found, key=lambda file: file.url)


def read_file(file: FoundFile) -> bytes | None:
    """Content of ``file``; None when it is not as long as it was found: somebody writes it."""
    filesystem, path = fsspec.core.url_to_fs(file.url, use_listings_cache=False)
    try:
        with answers(file.url):
            content = bytes(filesystem.cat_file(path))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise ConfigurationError(f"{file.url} cannot be read: {error}") from error
    except OSError as error:
        raise ServiceUnreachable(f"{file.url} cannot be read: {error}") from error
    return content if len(content) == file.num_bytes else None


def files_below(folder: str) -> list[str]:
    """Paths of all files below ``folder``, relative to it, sorted; nothing hidden."""
    filesystem, base = fsspec.core.url_to_fs(folder, use_listings_cache=False)
    with answers(folder):
        found = filesystem.find(base)
    names = (str(name).removeprefix(f"{base}/") for name in found)
    return sorted(n for n in names if not any(_is_hidden(part) for part in n.split("/")))


def _protocols(filesystem: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _is_hidden(name: str) -> bool:
    return PurePosixPath(name).name.startswith(".")
