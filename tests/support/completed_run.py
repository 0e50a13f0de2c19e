"""A complete run without engines and trainer: eight updates, everything that proves them."""

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Self

from activities.rollout.collection_file import write_collection
from activities.storage import layout
from activities.storage.commit import saved_folders
from activities.storage.store import Store
from configs.load import document_sha256, resolve_document
from tests.support.synthetic_run import SyntheticRun, document_of, group_of

UPDATES = 8
EVALUATED = (0, 4, 8)
HELD_OUT = 3


class CompletedRun(SyntheticRun):
    """Checkpoints after updates 3 and 7, evaluations after 0, 4 and 8 updates, an export."""

    def __init__(self, root: str, *, stop_after: int = UPDATES, export_hf: bool = True) -> None:
        super().__init__(root)
        self.document = resolve_document(
            _document(self.store.root, export_hf), origin="made"
        ).document
        self.store.write_json(layout.RESOLVED_CONFIG, self.document)
        self._prepare()
        self.publish(0)
        self.evaluate(0)
        for update in range(stop_after):
            self.updates(update, update)
            self.publish(update + 1)
            if (update + 1) % 4 == 0:
                self.checkpoint()
                self.evaluate(update + 1)
        self.export()
        self.write_state("complete", stop_after)

    def copied_to(self, folder: Path) -> Self:
        """The same run in a copy of its root, free to be damaged."""
        shutil.copytree(self.store.root, folder)
        other = copy.copy(self)
        other.store = Store(folder)
        return other

    def write_state(self, status: str, updates: int, **more: Any) -> None:
        """Replace ``workflow.json``."""
        state = {
            "run_id": self.ref.run_id,
            "spec_sha256": document_sha256(self.document),
            "status": status,
            "attempt": 0,
            "epoch": self.epoch,
            "update": updates,
            "result": {"stopped_for_time": False, "export_hf": "export-hf"},
        }
        self.store.write_json(layout.WORKFLOW_JSON, state | more)

    def checkpoint_of(self, update: int) -> str:
        """Folder of the checkpoint after ``update``, relative to the root."""
        (found,) = [each for each in saved_folders(self.store) if each.update == update]
        return found.folder

    def _prepare(self) -> None:
        outputs = {}
        for name in ("train.jsonl", "eval.jsonl", "verifiers.json"):
            data = f"{name}\n".encode()
            self.store.write_bytes(f"{layout.PREPARED_DATA}/{name}", data)
            outputs[name] = hashlib.sha256(data).hexdigest()
        self.store.write_json(layout.MANIFEST_JSON, {"outputs": outputs})
        self.store.write_bytes(f"{layout.PREPARED_MODEL}/config.json", b"{}")
        marker = {"prepared_files": [{"path": "config.json", "size": 2}]}
        self.store.write_json(f"{layout.PREPARED_MODEL}/workflow-model.json", marker)
        self.store.write_json(layout.PREPARED_REPORT, {"eval_prompts": HELD_OUT})

    def publish(self, version: int) -> None:
        """Append the row of a publication."""
        self.store.append_jsonl(layout.PUBLICATION, {"version": version, "digest": "d"})

    def evaluate(self, updates: int) -> None:
        """Write samples and row of an evaluation after ``updates`` updates."""
        draws = self.source_at(self.position()).draw(HELD_OUT)
        groups = [group_of(draw, updates, (1.0,)) for draw in draws]
        uri = layout.eval_parquet(updates, self.epoch)
        sha256 = write_collection(self.store, uri, groups)
        row = {"kind": "eval", "update": updates, "eval/step": updates}
        self.store.append_jsonl(layout.METRICS, {**row, "uri": uri, "sha256": sha256})

    def export(self) -> None:
        """Write a finished export."""
        for name in (".complete", "config.json"):
            self.store.write_bytes(f"export-hf/{name}", b"")
        self.store.write_bytes("export-hf/model.safetensors", safetensors_file(b"12345678"))


def safetensors_file(data: bytes) -> bytes:
    """A weight file of one float32 tensor, by the format's description."""
    entry = {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode()
    return len(header).to_bytes(8, "little") + header + data


def _document(root: str, export_hf: bool) -> dict[str, Any]:
    document: dict[str, Any] = document_of(root, 4)
    document["data"]["eval_prompt_data"] = "/data/eval.jsonl"
    document["training"] |= {"save_interval": 4}
    document["evaluation"] = {"interval": 4}
    document["output"]["export_hf"] = export_hf
    document["core"] = {"checkpoint_keep_last": 2}
    return document
