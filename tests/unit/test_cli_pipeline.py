"""What the display and ``status`` tell of a fully async run, from its newest rows."""

import asyncio
import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from activities.storage import layout
from activities.storage.store import Store
from models.checkpoint import CheckpointRef
from models.ids import RunRef
from models.run import LoopPlan, RunProgress, RunState
from workers.cli import pipeline as pipelines
from workers.cli.display import PlainReporter, panel
from workers.cli.overview import show_overview
from workers.cli.pipeline import Pipeline, PipelineWatch, queue_detail, read_pipeline

DEADLINE_S = 10.0
SEEN = Pipeline(
    publication_mode="refresh",
    observed_unix=None,
    queued_groups=8,
    capacity_groups=16,
    running_groups=10,
    blocked_groups=2,
    requeued_groups=3,
    stale_groups=1,
    wait_seconds=0.42,
)


def progress(root: str = "", done: int = 5) -> RunProgress:
    return RunProgress(
        run=RunRef(run_id="train/a", root=root, spec_sha256="0" * 64) if root else None,
        state=RunState.TRAINING,
        stage=f"optimize {done}",
        plan=LoopPlan(num_rollouts=10, fully_async=True, max_policy_lag=6),
        next_update=done,
        reward_recent=tuple(index / 10 for index in range(done)),
        training_started_unix=1.7e9,
        lag=2,
        tokens_per_second=1234.0,
        seconds_per_update=2.0,
    )


def written(root: Path) -> Store:
    store = Store(str(root))
    store.write_json(layout.RESOLVED_CONFIG, {"core": {"publication_mode": "refresh"}})
    for queued in (1, 8):
        row = {
            "time_unix": 1.79e9,
            "completed_queue_groups": queued,
            "completed_queue_capacity_groups": 16,
            "producer_owned_groups": 12,
            "producer_ready": {"groups": 2, "samples": 16, "response_tokens": 96},
            "errors/requeued_groups": 3,
        }
        store.append_jsonl(layout.PIPELINE_OCCUPANCY, row)
    for waited in (9.0, 0.42):
        metrics = {"rollout/fully_async/stale_groups_filtered": 1.0}
        row = {"collection_wait_seconds": waited, "queue_metrics": metrics}
        store.append_jsonl(layout.ROLLOUT_FLOW, row)
    return store


def text_of(*reports: Any, width: int = 100) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(*reports)
    return stream.getvalue()


def test_the_newest_rows_are_read(tmp_path: Path) -> None:
    written(tmp_path)
    assert read_pipeline(str(tmp_path)) == replace(SEEN, observed_unix=1.79e9)


def test_rows_of_a_former_start_are_not_shown(tmp_path: Path) -> None:
    written(tmp_path)
    before = replace(Pipeline(*[None] * 9), publication_mode="refresh")
    assert read_pipeline(str(tmp_path), since_unix=1.8e9) == before
    preparing = progress(str(tmp_path)).model_copy(update={"training_started_unix": None})
    assert PipelineWatch().newest(preparing) is None


def test_a_resumed_run_shows_what_its_checkpoint_holds() -> None:
    checkpoint = CheckpointRef(update=3, policy_version=4, folder="core/x", marker_sha256="0")
    preparing = progress(done=0).model_copy(
        update={"state": RunState.PREPARING, "checkpoint": checkpoint}
    )
    assert "update 4 of 10" in text_of(panel("train/a", preparing, "", 0.0, None))


def test_a_root_without_rows_tells_nothing(tmp_path: Path) -> None:
    unknown = Pipeline(*[None] * 9)
    assert read_pipeline(str(tmp_path)) == unknown
    assert read_pipeline(str(tmp_path / "nowhere")) == unknown
    text = text_of(panel("train/a", progress(), "", 0.0, None, unknown))
    assert "queue" not in text
    assert "last collection" not in text


def test_the_panel_has_two_lines_of_the_pipeline() -> None:
    text = text_of(panel("train/a", progress(), "", 0.0, None, SEEN))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "speed 2.00 s/update 1,234 tokens/s, lag 2 of at most 6" in lines
    assert (
        "queue 8/16 groups ready, 10 under way, 2 more wait for room (refresh), 3 requeued" in lines
    )
    assert "wait 0.42 s for the groups of the last collection, 1 too old" in lines


def test_an_old_observation_says_its_age() -> None:
    seen = replace(SEEN, observed_unix=1000.0)
    assert "ago" not in queue_detail(seen, 1020.0)
    assert queue_detail(seen, 1090.0).endswith("90 s ago")


def test_the_newest_update_line_names_the_queue() -> None:
    stream = io.StringIO()
    with PlainReporter(Console(file=stream, width=80)) as reporter:
        reporter.show(progress(done=0))
        reporter.show(progress(done=2), "", SEEN)
    assert stream.getvalue().splitlines() == [
        "update 1/10 reward 0.000",
        "update 2/10 reward 0.100 lag 2 1,234 tokens/s 2.00 s/update queue 8/16",
    ]


async def test_a_followed_run_is_read_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.setattr(pipelines, "READ_S", 0.0)
    watch = PipelineWatch()
    assert watch.newest(progress(str(tmp_path))) is None
    async with asyncio.timeout(DEADLINE_S):
        while watch.newest(progress(str(tmp_path))) is None:
            await asyncio.sleep(0.001)
    assert watch.newest(progress(str(tmp_path))) == replace(SEEN, observed_unix=1.79e9)


async def test_a_sequential_run_is_not_read(tmp_path: Path) -> None:
    written(tmp_path)
    watch = PipelineWatch()
    sequential = progress(str(tmp_path)).model_copy(update={"plan": LoopPlan(num_rollouts=10)})
    assert watch.newest(sequential) is None
    assert watch.newest(None) is None


def test_status_has_a_line_for_a_fully_async_run_only() -> None:
    common = {
        "state": "training", "update": 5, "total": 10, "policy_version": 5,
        "stage": "optimize 5", "root": "/r", "actors": [], "lag": 2, "lag_limit": 6,
    }  # fmt: skip
    runs = [
        {**common, "run_id": "train/free", "pipeline": asdict(SEEN)},
        {**common, "run_id": "train/strict", "pipeline": None},
    ]
    stream = io.StringIO()
    show_overview(Console(file=stream, width=160), {"runs": runs, "processes": []})
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert "run mode queue under way lag requeued too old trainer wait" in lines
    assert "train/free refresh 8/16 10 2 of 6 3 1 0.42 s" in lines
    stream = io.StringIO()
    show_overview(Console(file=stream, width=160), {"runs": runs[1:], "processes": []})
    assert "under way" not in stream.getvalue()
