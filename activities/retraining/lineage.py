"""The lineage of a retraining, and ``latest.json``, the pointer that follows from it.

A record is a file of its own that is created exclusively under the next number: of two decisions at
the same time one comes first and the other sees it. The pointer is replaced atomically afterwards.
A kill in between leaves the older pointer, and whoever touches the root next puts it right. So
readers of the pointer see one promoted, complete export or another, never anything else.
"""

import hashlib

import structlog

from activities.storage import layout
from activities.storage.patterns import files_below
from activities.storage.store import Store
from models.errors import ContractViolation
from models.retraining import Decision, FileDigest, FolderDigest, LatestPointer, LineageRecord

_log = structlog.get_logger(__name__)


def read_lineage(store: Store) -> list[LineageRecord]:
    """All records, oldest first.

    Raises:
        ContractViolation: a record is damaged, or one is missing.
    """
    records = []
    for number, name in enumerate(store.list(layout.LINEAGE), start=1):
        path = layout.lineage_record(number)
        if name != path.rpartition("/")[2]:
            raise ContractViolation(
                f"{store.root}/{path} is missing; records are never removed: restore it"
            )
        try:
            records.append(LineageRecord.model_validate(store.read_json(path)))
        except ValueError as error:
            raise ContractViolation(f"{store.root}/{path} is no lineage record") from error
    return records


def append_record(store: Store, record: LineageRecord) -> bool:
    """Add ``record`` under its number; False when another one has taken it."""
    data = record.model_dump_json(indent=2).encode() + b"\n"
    return store.create_exclusive(layout.lineage_record(record.number), data)


def newest_promotion(records: list[LineageRecord]) -> LineageRecord | None:
    """The record that ``latest.json`` must point to; None before the first promotion."""
    promoted = [each for each in records if each.decision is Decision.PROMOTED]
    return promoted[-1] if promoted else None


def point_to_newest(store: Store) -> LatestPointer | None:
    """Make ``latest.json`` name the newest promotion; returns what it names then.

    Read again after each write: a slower writer must not leave an older one.
    """
    while True:
        record = newest_promotion(read_lineage(store))
        pointer = read_pointer(store)
        if record is None or (pointer is not None and pointer.record == record.number):
            return pointer
        wanted = _pointer_of(record)
        store.write_json(layout.LATEST_EXPORT, wanted.model_dump(mode="json"))
        _log.info("latest export", export=wanted.export, record=record.number)


def read_pointer(store: Store) -> LatestPointer | None:
    """What ``latest.json`` says; None while there is none."""
    if not store.exists(layout.LATEST_EXPORT):
        return None
    try:
        return LatestPointer.model_validate(store.read_json(layout.LATEST_EXPORT))
    except ValueError as error:
        raise ContractViolation(
            f"{store.root}/{layout.LATEST_EXPORT} is no pointer; remove it, the next firing writes "
            "it again"
        ) from error


def digest_folder(path: str) -> FolderDigest:
    """Every file of the folder ``path`` by SHA-256, hidden ones left out. Reads all of it.

    Raises:
        ContractViolation: the folder is missing or empty.
    """
    store = Store(path)
    files = tuple(
        FileDigest(path=name, num_bytes=store.size(name), sha256=store.sha256(name))
        for name in files_below(path)
    )
    if not files:
        raise ContractViolation(f"{path} is missing or empty; restore it")
    lines = "".join(f"{file.sha256}  {file.path}\n" for file in files)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    return FolderDigest(path=path, digest=digest, files=files)


def _pointer_of(record: LineageRecord) -> LatestPointer:
    export, comparison = record.export, record.comparison
    if export is None or comparison is None or comparison.candidate is None:
        raise ContractViolation(f"record {record.number} promotes nothing: it has no export")
    return LatestPointer(
        export=export.path,
        digest=export.digest,
        files=export.files,
        run_id=record.run_id,
        firing=record.firing,
        record=record.number,
        metric=comparison.metric,
        value=comparison.candidate,
        promoted_unix=record.recorded_unix,
    )
