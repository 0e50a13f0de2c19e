"""Choosing the new data of a firing: files that no decided firing has trained on, by content."""

import hashlib
from collections.abc import Callable, Sequence, Sized
from typing import NamedTuple

from activities.storage.patterns import find_files, read_file
from models.retraining import DataFile, LineageRecord

CheckRows = Callable[[str, bytes, str], Sized]
"""Records of a JSONL file (name, content, default verifier), as a run reads them;
``ConfigurationError`` naming a wrong line."""


class Chosen(NamedTuple):
    """New files and their rows in one piece; or none, and why."""

    files: tuple[DataFile, ...]
    content: bytes
    reason: str


def choose(
    patterns: Sequence[str],
    records: Sequence[LineageRecord],
    verifier: str,
    check_rows: CheckRows,
) -> Chosen:
    """New files of ``patterns``: content not in a promoted or refused firing's data, checked.

    A file that changes while it is read is left for the next firing, an empty one as well.

    Raises:
        ConfigurationError: a pattern cannot be followed, or a file holds something else than rows.
        ServiceUnreachable: the storage did not answer.
    """
    found = {file.url: file for pattern in patterns for file in find_files(pattern)}
    used = {
        file.sha256 for record in records if record.decision.is_final for file in record.data.files
    }
    files: list[DataFile] = []
    parts: list[bytes] = []
    unfinished = 0
    for _, file in sorted(found.items()):
        content = read_file(file) if file.num_bytes else None
        if content is None:
            unfinished += 1
            continue
        digest = hashlib.sha256(content).hexdigest()
        if digest in used:
            continue
        used.add(digest)
        rows = len(check_rows(file.url, content, verifier))
        files.append(DataFile(url=file.url, num_bytes=file.num_bytes, sha256=digest, rows=rows))
        parts.append(content.removeprefix(b"\xef\xbb\xbf").rstrip(b"\n") + b"\n")
    reason = ""
    if not files:
        reason = _nothing(patterns, num_found=len(found), unfinished=unfinished)
    return Chosen(tuple(files), b"".join(parts), reason)


def _nothing(patterns: Sequence[str], *, num_found: int, unfinished: int) -> str:
    named = ", ".join(patterns)
    if not num_found:
        return f"no file matches {named}"
    used = num_found - unfinished
    beside = f", {unfinished} empty or being written" if unfinished else ""
    return f"no new data: of {num_found} files of {named}, {used} were trained on before{beside}"
