"""The W&B sink, against the real library in offline mode and against a stand-in."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from configs.data import DataSection
from configs.launch import OutputSection, TrackingSection
from configs.model import ModelSection
from configs.run import RunSpec
from models.ids import RunRef
from models.metrics import METRICS
from tests.support import wandb_file
from workers.tracking import wandb_sink
from workers.tracking.background import TrackerCounts
from workers.tracking.wandb_sink import WandbSink, metric_axes, wandb_run_id

DEADLINE_S = 30.0


def make_spec(name: str, root: str, mode: str = "offline") -> RunSpec:
    return RunSpec(
        schema_version=1,
        name=name,
        model=ModelSection(source="tiny"),
        data=DataSection(prompt_data="prompts.jsonl"),
        output=OutputSection(root=root),
        tracking=TrackingSection(wandb_mode=mode),  # type: ignore[arg-type]
    )


def make_run(name: str, root: object) -> RunRef:
    return RunRef(run_id=f"train/{name}", root=str(root), spec_sha256="ab" * 32)


class StandIn:
    """What the sink uses of wandb, recorded call by call."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failing = failing

    def _called(self, name: str, argument: Any = None) -> None:
        self.calls.append((name, argument))
        if name == self.failing:
            raise RuntimeError(f"{name} fails")

    def init(self, **settings: Any) -> "StandIn":
        self._called("init", settings)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self._called("define_metric", (name, step_metric))

    def log(self, row: dict[str, float]) -> None:
        self._called("log", row)

    def finish(self) -> None:
        self._called("finish")

    def teardown(self) -> None:
        self._called("teardown")

    def Settings(self, **values: Any) -> dict[str, Any]:
        return values

    def arguments(self, name: str) -> list[Any]:
        return [argument for called, argument in self.calls if called == name]


def test_offline_files_of_two_runs_in_one_process_hold_their_rows(tmp_path: Path) -> None:
    runs = [make_run(name, tmp_path / name) for name in ("first", "second")]
    for run in runs:
        Path(run.root).mkdir()
    sink = WandbSink(lambda run: make_spec(Path(run.root).name, run.root))
    for step in range(3):
        for run in runs:
            sink.log(run, {"train/step": step, "train/loss": 0.25})
    assert sink.close(DEADLINE_S)
    assert sink.counts == TrackerCounts(recorded=6, failed=0, dropped=0)
    for run in runs:
        folders = list((Path(run.root) / "wandb").glob(f"offline-run-*-{wandb_run_id(run)}"))
        assert len(folders) == 1
        written = (folders[0] / f"run-{wandb_run_id(run)}.wandb").read_bytes()
        # names, axes and configuration stand in the record file as plain text
        for text in (b"train/loss", b"train/step", b"errors/elapsed_seconds", b"spec_sha256"):
            assert text in written


def test_rows_of_different_axes_are_kept_apart_offline(tmp_path: Path) -> None:
    run = make_run("mixed", tmp_path)
    rows = [
        {"train/step": 3.0, "train/loss": 0.25},
        {"errors/elapsed_seconds": 15.0, "errors/transport_groups": 1.0, "errors/fatal": 0.0},
        {"eval/step": 4.0, "eval/words": 0.5},
        {"errors/elapsed_seconds": 30.0, "errors/transport_groups": 2.0, "errors/fatal": 0.0},
    ]
    sink = WandbSink(lambda run: make_spec("mixed", run.root))
    for row in rows:
        sink.log(run, row)
    assert sink.close(DEADLINE_S)
    (path,) = (tmp_path / "wandb").glob(f"offline-run-*/run-{wandb_run_id(run)}.wandb")
    assert wandb_file.history(path) == rows
    assert wandb_file.axes(path) == {f"{part}/*": axis for part, axis in metric_axes().items()}


def test_a_later_process_continues_the_same_wandb_run(tmp_path: Path) -> None:
    run = make_run("a", tmp_path)
    for _ in range(2):
        stand_in = StandIn()
        sink = WandbSink(lambda run: make_spec("a", run.root), backend=stand_in)
        sink.log(run, {"train/loss": 1.0})
        assert sink.close(DEADLINE_S)
        (settings,) = stand_in.arguments("init")
        assert settings["id"] == wandb_run_id(run)
        assert settings["resume"] == "allow"


def test_runs_that_differ_in_name_or_root_have_their_own_wandb_run() -> None:
    ids = {wandb_run_id(make_run(name, root)) for name in ("a", "b") for root in ("/x", "/y")}
    assert len(ids) == 4


def test_the_resolved_configuration_and_its_digest_are_sent(tmp_path: Path) -> None:
    stand_in = StandIn()
    sink = WandbSink(lambda run: make_spec("a", run.root), backend=stand_in)
    sink.log(make_run("a", tmp_path), {"train/loss": 1.0})
    assert sink.close(DEADLINE_S)
    (settings,) = stand_in.arguments("init")
    assert settings["config"]["name"] == "a"
    assert settings["config"]["spec_sha256"] == "ab" * 32
    assert settings["dir"] == str(tmp_path)
    assert settings["mode"] == "offline"


def test_every_declared_metric_is_plotted_against_its_axis(tmp_path: Path) -> None:
    stand_in = StandIn()
    sink = WandbSink(lambda run: make_spec("a", run.root), backend=stand_in)
    sink.log(make_run("a", tmp_path), {"train/loss": 1.0})
    assert sink.close(DEADLINE_S)
    globs = {name: axis for name, axis in stand_in.arguments("define_metric") if axis}
    for metric in METRICS:
        assert globs[metric.name.split("/")[0] + "/*"] == metric.axis
    assert metric_axes()["errors"] == "errors/elapsed_seconds"
    assert metric_axes()["perf"] == "rollout/step"  # rows of collections have no axis of their own


def test_disabled_tracking_never_imports_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises now
    sink = WandbSink(lambda run: make_spec("a", run.root, "disabled"))
    sink.log(make_run("a", tmp_path), {"train/loss": 1.0})
    assert sink.close(DEADLINE_S)
    assert sink.counts == TrackerCounts(recorded=1, failed=0, dropped=0)


@pytest.mark.parametrize("failing", ["init", "define_metric", "log"])
def test_a_failing_back_end_is_counted_and_never_raised(tmp_path: Path, failing: str) -> None:
    stand_in = StandIn(failing)
    sink = WandbSink(lambda run: make_spec("a", run.root), backend=stand_in)
    sink.log(make_run("a", tmp_path), {"train/loss": 1.0})
    sink.log(make_run("a", tmp_path), {"train/loss": 2.0})
    assert sink.close(DEADLINE_S)
    assert sink.counts == TrackerCounts(recorded=0, failed=2, dropped=0)
    assert len(stand_in.arguments("init")) == 1  # a run that cannot be opened is not hammered


def test_a_run_that_could_not_be_opened_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_sink, "REOPEN_AFTER_S", 0.0)
    stand_in = StandIn("init")
    sink = WandbSink(lambda run: make_spec("a", run.root), backend=stand_in)
    for loss in (1.0, 2.0):
        sink.log(make_run("a", tmp_path), {"train/loss": loss})
    assert sink.close(DEADLINE_S)
    assert len(stand_in.arguments("init")) == 2


def test_all_runs_are_finished_although_finishing_fails(tmp_path: Path) -> None:
    stand_in = StandIn("finish")
    sink = WandbSink(lambda run: make_spec("a", run.root), backend=stand_in)
    for name in ("a", "b"):
        sink.log(make_run(name, tmp_path), {"train/loss": 1.0})
    assert sink.close(DEADLINE_S)
    assert [name for name, _ in stand_in.calls][-3:] == ["finish", "finish", "teardown"]


def test_a_remote_root_keeps_its_wandb_files_in_a_scratch_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stand_in = StandIn()
    sink = WandbSink(lambda run: make_spec("a", run.root), backend=stand_in)
    sink.log(make_run("a", "memory://bucket/run"), {"train/loss": 1.0})
    assert sink.close(DEADLINE_S)
    (settings,) = stand_in.arguments("init")
    assert Path(settings["dir"]).is_dir()
    assert Path(settings["dir"]).parent == tmp_path
