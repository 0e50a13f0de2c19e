"""Lineage records without runs, and a process that decides on one firing after another."""

from pathlib import Path
from typing import Any

from activities.retraining.lineage import (
    append_record,
    digest_folder,
    point_to_newest,
    read_lineage,
)
from activities.storage.store import Store
from models.retraining import Comparison, DataChoice, Decision, LineageRecord, Parent


def record(number: int, decision: Decision, root: Path, **data: Any) -> LineageRecord:
    """A record; a promotion comes with an export of one file."""
    export = None
    if decision is Decision.PROMOTED:
        folder = root / "runs" / str(number) / "export-hf"
        Store(folder).write_bytes("model.safetensors", f"weights {number}".encode())
        export = digest_folder(str(folder))
    comparison = Comparison(
        metric="eval/heldout",
        higher_is_better=True,
        tolerance=0,
        parent=0.5,
        candidate=0.5,
        updates=2,
        max_unscored_fraction=0,
        parent_unscored=0,
        candidate_unscored=0,
        data_sha256="e",
    )
    return LineageRecord(
        number=number,
        firing=f"firing-{number}",
        run_id=f"train/firing-{number}",
        run_root=str(root),
        decision=decision,
        reason="planted",
        config_sha256="c",
        data=DataChoice(path="train.jsonl", sha256="d", rows=1, files=data.get("files", ())),
        parent=Parent(source="base"),
        export=export,
        comparison=comparison,
        recorded_unix=1.0,
    )


def promote_for_ever(root: str) -> None:
    """What ``decide`` does with firings that are promoted and refused in turn."""
    store = Store(root)
    while True:
        number = len(read_lineage(store)) + 1
        decision = Decision.PROMOTED if number % 3 else Decision.REFUSED
        append_record(store, record(number, decision, Path(root)))
        point_to_newest(store)
