"""A scheduled retraining whose runs are real workflows on a fake fleet, and its files."""

import json
from pathlib import Path
from typing import Any

from activities.site import spec_of
from activities.storage import layout
from activities.storage.store import Store
from configs.load import resolve_document
from models.ids import FenceToken
from models.retraining import RetrainingRequest
from models.run import PrepareReport, PrepareRequest
from tests.support.fake_fleet import FakeFleet


class RetrainingFleet(FakeFleet):
    """Leaves what ``prepare`` leaves of a run, so that its data and evaluations can be traced."""

    def scores(self, parent: float, candidate: float, unscored: float = 0.0) -> None:
        """The held-out rewards of the next run, before and after; ``unscored`` of the latter."""
        for phase, reward, missing in (("initial", parent, 0.0), ("final", candidate, unscored)):
            self.script.reports[phase] = {
                "name": "heldout",
                "reward_mean": reward,
                "error_fraction": missing,
                "metrics": {
                    "eval/heldout-none_reward_ratio": missing,
                    "eval/heldout-truncated_ratio": 1 - reward,
                },
            }

    async def prepare(self, token: FenceToken, request: PrepareRequest) -> PrepareReport:
        report = await super().prepare(token, request)
        store, spec = Store(request.run.root), spec_of(request.run)
        inputs = {
            f"data.{key}": Store("/").sha256(path.lstrip("/"))
            for key, path in spec.data.model_dump().items()
            if key in ("prompt_data", "eval_prompt_data") and path
        }
        outputs = {"train.jsonl": "a" * 64, "eval.jsonl": "e" * 64}
        manifest = {
            "schema_version": 1,
            "contract": {},
            "inputs": inputs,
            "outputs": outputs,
            "rows": {"train": 1, "eval": 1},
            "provenance": {},
        }
        store.write_json(layout.MANIFEST_JSON, manifest)
        store.write_bytes(f"{layout.PREPARED_MODEL}/config.json", b"{}")
        return report


class RetrainingDesk:
    """A folder of new data, a held-out file, and the request of a retraining."""

    def __init__(self, folder: Path, name: str, fleet: str) -> None:
        self.folder = folder
        self.name = name
        self.fleet = fleet
        self.root = folder / "retraining"
        self.new = folder / "new"
        self.new.mkdir(parents=True)
        (folder / "eval.jsonl").write_text(_rows("held-out"))
        (folder / "seed.jsonl").write_text(_rows("seed"))

    @property
    def store(self) -> Store:
        return Store(self.root)

    def add_data(self, name: str, text: str | None = None) -> Path:
        """A new data file; its rows are about its name unless ``text`` is given."""
        path = self.new / name
        path.write_text(_rows(name) if text is None else text)
        return path

    def document(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """A run file of two updates that a retraining accepts; sections are merged into it."""
        document: dict[str, Any] = {
            "schema_version": 1,
            "name": self.name,
            "model": {"source": str(self.folder / "base")},
            "data": {
                "prompt_data": str(self.folder / "seed.jsonl"),
                "eval_prompt_data": str(self.folder / "eval.jsonl"),
            },
            "output": {"root": str(self.root), "export_hf": True},
            "training": {"num_rollouts": 2, "rollout_batch_size": 2, "samples_per_prompt": 2},
            "launch": {"fleet": self.fleet, "heartbeat_timeout_s": 1.0},
        }
        for section, values in sections.items():
            document[section] = {**document.get(section, {}), **values}
        return document

    def request(self, **fields: Any) -> RetrainingRequest:
        """The request; ``config`` replaces the run file."""
        config = resolve_document(fields.pop("config", self.document()), origin="test").document
        given = {"data": [f"{self.new}/*.jsonl"], **fields}
        return RetrainingRequest.model_validate_json(json.dumps({"config": config, **given}))

    def pointer(self) -> dict[str, Any] | None:
        """What ``latest.json`` holds."""
        if not self.store.exists(layout.LATEST_EXPORT):
            return None
        found: dict[str, Any] = self.store.read_json(layout.LATEST_EXPORT)
        return found


def _rows(word: str) -> str:
    return "".join(json.dumps({"prompt": f"{word} {n}", "answer": f"{n}"}) + "\n" for n in range(4))
