"""Packing and unpacking a folder of compiled kernels."""

import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_BYTES = 8 << 30
"""Unpacked; an archive that claims more is damaged, or worse."""
_PICKLES = frozenset(("fxgraph", "aotautograd", "fxgraph_remote"))
"""Folders of torch whose files are pickles. They stay at home: reading one could run anything."""
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt")


class DamagedArchive(Exception):
    """It cannot be used; the caller goes on without it."""


def shared_files(folder: Path) -> Iterator[PurePosixPath]:
    """Files that may travel, relative to ``folder``, in order; no links and no unfinished ones."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _PICKLES)
        for name in sorted(names):
            path = Path(place, name)
            if _travels(PurePosixPath(name)) and path.is_file() and not path.is_symlink():
                yield PurePosixPath(path.relative_to(folder).as_posix())


def pack(folder: Path, target: Path, max_bytes: int) -> int:
    """Write the files of ``folder`` to ``target`` (tar, gzip); return how many there are.

    Raises:
        OSError: no space, or ``folder`` cannot be read.
        DamagedArchive: the files are larger than ``max_bytes`` together.
    """
    total = count = 0
    with tarfile.open(target, "w:gz", compresslevel=1) as archive:
        for relative in shared_files(folder):
            try:
                content = (folder / relative).read_bytes()
            except FileNotFoundError:
                continue  # a compiler renamed its own
            total += len(content)
            if total > max_bytes:
                raise DamagedArchive(f"{folder} holds more than {max_bytes} bytes")
            member = tarfile.TarInfo(str(relative))
            member.size, member.mode = len(content), 0o755 if relative.suffix == ".so" else 0o644
            archive.addfile(member, io.BytesIO(content))
            count += 1
    return count


def unpack(archive: Path, folder: Path) -> int:
    """Write the files of ``archive`` below ``folder``; what is there stays. How many were written.

    Raises:
        OSError: no space.
        DamagedArchive: it is torn, or a name leads elsewhere.
    """
    total = count = 0
    try:
        with tarfile.open(archive, "r:gz") as members:
            for member in members:
                target = folder / _checked(member)
                total += member.size
                if total > MAX_BYTES:
                    raise DamagedArchive(f"more than {MAX_BYTES} bytes")
                stream = members.extractfile(member)
                if stream is None or target.exists():
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                draft = target.with_name(f".{target.name}.restoring")
                draft.write_bytes(stream.read())
                draft.chmod(member.mode & 0o755)
                draft.replace(target)
                count += 1
    except (tarfile.TarError, EOFError, zlib.error, ValueError) as error:
        raise DamagedArchive(f"it is torn: {error}") from error
    return count


def _checked(member: tarfile.TarInfo) -> PurePosixPath:
    name = PurePosixPath(member.name)
    inside = not name.is_absolute() and ".." not in name.parts and bool(name.parts)
    if not member.isreg() or not inside or not _travels(name):
        raise DamagedArchive(f"{member.name!r} is nothing that a cache holds")
    return name


def _travels(name: PurePosixPath) -> bool:
    if _PICKLES.intersection(name.parts) or name.suffix in _PICKLE_SUFFIXES:
        return False
    return not name.name.startswith((".", "tmp.")) and name.suffix not in (".lock", ".tmp")
