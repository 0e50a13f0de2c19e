"""A fork of a run's root: self-contained, accounted for, whole or not there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from activities import forking
from activities.analysis.audit import audit
from activities.analysis.completion_checks import verify
from activities.forking import fork, plan_fork
from activities.storage import layout
from activities.storage.commit import newest_checkpoint, read_cursor, verify_checkpoint
from activities.storage.lease import current_epoch, read_owner
from activities.storage.store import Store
from configs.fork import forked_run
from configs.load import Loaded
from models.errors import ConfigurationError, DigestMismatch
from models.ids import RunRef
from tests.support.completed_run import CompletedRun
from workers.cli.app import run_command


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    return CompletedRun(str(tmp_path_factory.mktemp("made") / "root"))


@pytest.fixture
def run(finished: CompletedRun, tmp_path: Path) -> CompletedRun:
    return finished.copied_to(tmp_path / "root")


def loaded_at(run: CompletedRun, target: Path, *overrides: str) -> Loaded:
    return forked_run(run.document, "other", str(target), overrides, 4)


def forked(run: CompletedRun, target: Path) -> CompletedRun:
    """The new root as a run that can go on."""
    loaded = loaded_at(run, target, "optimizer.learning_rate=1e-5")
    fork(run.store, loaded, plan_fork(run.store, 4))
    other = run.copied_to(target.parent / "throwaway")
    other.store = Store(target)
    other.document = loaded.document
    other.ref = RunRef(run_id="train/other", root=other.store.root, spec_sha256=loaded.sha256)
    return other


def content(root: str) -> dict[str, bytes]:
    """Every file below a root."""
    base = Path(root)
    return {str(p.relative_to(base)): p.read_bytes() for p in base.rglob("*") if p.is_file()}


def test_a_fork_begins_where_the_checkpoint_stands_and_leaves_its_source_alone(
    run: CompletedRun, tmp_path: Path
) -> None:
    before = content(run.store.root)
    other = forked(run, tmp_path / "other")
    assert content(run.store.root) == before
    books = audit(other.store.root)
    assert books.is_clean, books.verdict
    assert (books.updates, books.run_id) == (4, "train/other")
    mine, theirs = newest_checkpoint(other.store), newest_checkpoint(run.store)
    assert mine is not None
    assert theirs is not None
    assert mine.update == 3
    marker = verify_checkpoint(other.store, mine)
    assert (marker.run_id, marker.spec_sha256) == ("train/other", other.ref.spec_sha256)
    cursor = run.store.read_json(f"{mine.folder}/{layout.CURSOR}")
    assert read_cursor(other.store, mine).model_dump(mode="json") == cursor
    lineage = other.store.read_json(layout.FORK_JSON)
    assert (lineage["source_run_id"], lineage["source_root"], lineage["updates"]) == (
        *("train/made", run.store.root),
        4,
    )
    assert current_epoch(other.store) == current_epoch(run.store)
    assert read_owner(other.store) is None
    kinds = [row["update"] for row in other.store.read_jsonl(layout.METRICS).rows]
    assert kinds == [0, 4]
    state = f"{mine.folder}/state.json"
    assert other.store.local_path(state).samefile(run.store.local_path(state))


def test_a_fork_that_was_trained_to_its_end_is_proved_complete(
    run: CompletedRun, tmp_path: Path
) -> None:
    other = forked(run, tmp_path / "other")
    other.claim()
    other.restore_trainer()
    assert other.epoch == current_epoch(run.store) + 1
    for update in range(4, 8):
        other.updates(update, update)
        other.publish(update + 1)
    other.evaluate(4)
    other.checkpoint()
    other.evaluate(8)
    other.export()
    other.store.write_json(layout.PREPARED_REPORT, run.store.read_json(layout.PREPARED_REPORT))
    other.write_state("complete", 8)
    found = verify(other.store.root)
    assert [check for check in found.checks if not check.holds] == []
    (updates,) = [check for check in found.checks if check.name == "updates"]
    assert "the first 4 by the run that it was forked from" in updates.evidence


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.seed=9"], "data: must be as in the run that is forked: the data cursor"),
        (['model.source="/models/big"'], "model: must be as in the run that is forked"),
        (["training.samples_per_prompt=4"], r"training\.samples_per_prompt: must be as in"),
        (
            ["training.global_batch_size=4", "core.max_policy_lag=1"],
            "must leave 1 optimizer steps an update",
        ),
        (["training.num_rollouts=4"], "must be above the 4 updates"),
        (["launch.auto_resume=false"], "must be true"),
        (["core.max_context_length=4096"], "the prompts were prepared for it"),
        (["optimizer.learnin_rate=1"], "did you mean"),
    ],
)
def test_a_run_file_that_breaks_with_the_checkpoint_is_refused(
    run: CompletedRun, tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        loaded_at(run, tmp_path / "other", *overrides)


def test_a_fork_onto_itself_or_onto_files_is_refused(run: CompletedRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is the forked run's own"):
        forked_run(run.document, "made", str(tmp_path / "other"), (), 4)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="taken is not empty"):
        fork(run.store, loaded_at(run, taken), plan_fork(run.store, 4))
    assert content(str(taken)) == {"notes.txt": b"mine"}
    with pytest.raises(ConfigurationError, match="no intact checkpoint after 5 updates"):
        plan_fork(run.store, 5)
    path = f"{run.checkpoint_of(3)}/state.json"
    run.store.write_bytes(path, b"?" * run.store.size(path))
    with pytest.raises(DigestMismatch, match="recorded SHA-256"):
        plan_fork(run.store, 4)


def test_buckets_are_refused_before_anything_is_read_or_made(
    run: CompletedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigurationError, match="memory://bucket/run: a run in a bucket"):
        plan_fork(Store("memory://bucket/run"), 4)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    words = ["fork", run.store.root, "--at", "4", "--to", "memory://bucket/other", "--no-start"]
    assert run_command(words) == 2
    assert "memory://bucket/other: a run is forked to a local folder" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_fork_that_breaks_off_is_not_there(
    run: CompletedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "other"
    left = [0]

    def link(source: Any, place: Any) -> None:
        if not left[0]:
            raise FileNotFoundError(source)
        left[0] -= 1
        os.link(source, place)

    monkeypatch.setattr(forking, "os", _Os(link))
    reference = plan_fork(run.store, 4)
    for links in range(8):
        left[0] = links
        with pytest.raises(FileNotFoundError):
            fork(run.store, loaded_at(run, target), reference)
        assert not target.exists()
        assert [path.name for path in tmp_path.iterdir()] == ["root"]


class _Os:
    """``os`` with another ``link``."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.replace = os.replace


def test_a_file_system_without_links_gets_copies(
    run: CompletedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Any, place: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(forking, "os", _Os(refuse))
    target = tmp_path / "other"
    fork(run.store, loaded_at(run, target), plan_fork(run.store, 4))
    assert audit(str(target)).is_clean


def test_the_verb_makes_a_root_and_says_how_to_start_it(
    run: CompletedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PERDURE_STATE_DIR", str(tmp_path / "state"))
    target = tmp_path / "forks" / "warmer"
    words = ["fork", run.store.root, "--at", "4", "--to", str(target), "--no-start"]
    assert run_command([*words, "--set", "optimizer.learning_rate=1e-5"]) == 0
    told = capsys.readouterr().err
    spec = target / layout.RESOLVED_CONFIG
    assert "train/warmer forked from train/made after 4 updates" in told
    assert told.endswith(f"start it: perdure run {spec}\n")
    document = json.loads(spec.read_text())
    assert (document["name"], document["optimizer"]["learning_rate"]) == ("warmer", 1e-5)
    assert run_command(["validate", str(spec), "--no-inputs"]) == 0
    assert run_command([*words]) == 2
    assert "is not empty" in capsys.readouterr().err
