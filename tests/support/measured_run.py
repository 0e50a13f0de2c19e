"""Files of a finished run whose every duration is chosen, for the tools that measure runs."""

from pathlib import Path
from typing import Any

from activities.storage import layout
from activities.storage.store import Store

STAGES = ("generation_wait", "training", "publication")
FLOW = "rollout/fully_async/completed_queue"
SHA = "0" * 64


class MeasuredRun:
    """A fully async run of ``updates`` updates: each stage 1 s, 100 response tokens."""

    def __init__(self, root: Path, *, updates: int = 4, trainer_ranks: int = 1) -> None:
        self.store = Store(root)
        self.updates = updates
        self.trainer_ranks = trainer_ranks
        self.plan: dict[str, Any] = {
            "runtime": {"shape": {"updates": updates, "fully_async": True, "overlapped": False}},
            "allocation": {
                "placement": "cpu",
                "gpus": None,
                "trainer_processes": trainer_ranks,
                "engine_processes": 1,
            },
        }
        self.workflow: dict[str, Any] = {
            "status": "complete",
            "update": updates,
            "run_id": "train/made",
            "result": {"stopped_for_time": False},
        }
        self.timings: list[dict[str, Any]] = []
        self.flow: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.contract: dict[int, list[dict[str, Any]]] = {r: [] for r in range(trainer_ranks)}
        self.lifecycle: list[dict[str, Any]] = []
        for update in range(updates):
            self.add_update(update)

    def add_update(self, update: int, *, tokens: int = 100, seconds: float = 1.0) -> None:
        """Its stages follow one another from second ``3 * update`` on."""
        for place, stage in enumerate(STAGES):
            self.add_stage(stage, update, 3.0 * update + place, seconds)
        self.flow.append(flow_row(update, tokens=tokens))
        self.lines.append(
            {"update": update, "epoch": 1, "batch_sha256": SHA, "policy_version": update + 1}
        )
        for rank in self.contract:
            self.contract[rank].append(step_event(update + 1, update, rank))

    def add_stage(
        self, stage: str, update: int | None, start: float, seconds: float, *, passed: bool = True
    ) -> None:
        row = {"stage": stage, "rollout_id": update, "started_unix": start, "seconds": seconds}
        self.timings.append({**row, "passed": passed})

    def write(self) -> str:
        """Write all files once; the root."""
        self.store.write_json(layout.PLAN_JSON, self.plan)
        self.store.write_json(layout.WORKFLOW_JSON, self.workflow)
        files = {
            layout.DRIVER_TIMING: self.timings,
            layout.ROLLOUT_FLOW: self.flow,
            layout.UPDATES: self.lines,
            layout.PIPELINE_LIFECYCLE: self.lifecycle,
            **{layout.training_contract(rank): rows for rank, rows in self.contract.items()},
        }
        for rel, rows in files.items():
            self.append(rel, rows)
        return self.store.root

    def append(self, rel: str, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.store.append_jsonl(rel, row)


def flow_row(update: int, *, tokens: int = 100, dropped: int = 0) -> dict[str, Any]:
    """The row of a collection of two groups of four samples."""
    metrics = {f"{FLOW}/consumer_wait_seconds": 0.25}
    for kind, taken, lost in (
        ("groups", 2, dropped // 50),
        ("samples", 8, dropped // 50 * 4),
        ("response_tokens", tokens, dropped),
    ):
        metrics |= {f"{FLOW}/delivered_{kind}": taken, f"{FLOW}/dropped_{kind}": lost}
    return {
        "rollout_id": update,
        "samples": 8,
        "response_tokens": tokens,
        "collection_wait_seconds": 0.5,
        "mixed_responses": 1,
        "queue_metrics": metrics,
    }


def step_event(
    step: int, update: int, rank: int, *, seconds: float = 0.5, model_tokens: int = 200
) -> dict[str, Any]:
    return {
        "event": "optimizer",
        "rank": rank,
        "step": step,
        "rollout_id": update,
        "elapsed_seconds": seconds,
        "optimizer_skipped": False,
        "normalization": {"model_tokens": model_tokens, "active_tokens": 100},
    }
