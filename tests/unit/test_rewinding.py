"""Rewinding a run's root: refused, decided, cut off by a kill, set aside, trained on."""

import contextlib
import copy
import json
import shutil
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from activities.analysis.audit import audit
from activities.analysis.completion_checks import verify
from activities.rewinding import plan_rewind, rewind_once, settle_rewinds
from activities.storage import layout
from activities.storage.commit import intact_checkpoints, newest_checkpoint
from activities.storage.objects import ObjectStore
from activities.storage.rewinds import has_unsettled, read_rewinds
from activities.storage.store import Store
from models.checkpoint import RewindRequest
from models.errors import ConfigurationError, StaleFence
from tests.support.completed_run import CompletedRun

TO_FOUR = RewindRequest(updates=4, reason="reward fell")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    return CompletedRun(str(tmp_path_factory.mktemp("made") / "root"))


@pytest.fixture
def run(finished: CompletedRun, tmp_path: Path) -> CompletedRun:
    return finished.copied_to(tmp_path / "root")


def rewound(run: CompletedRun) -> None:
    """What ``claim`` does."""
    run.claim()
    rewind_once(run.store, TO_FOUR, run.epoch, "again")
    settle_rewinds(run.store, "export-hf", run.epoch)


def content(run: CompletedRun) -> dict[str, bytes]:
    """Every file below the root."""
    root = Path(run.store.root)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("updates", "reason"),
    [
        (5, r"no intact checkpoint after 5 updates; there are checkpoints after 4, 8 updates"),
        (9, r"no checkpoint after 9 updates, only 8 are finished"),
        (8, r"stands after 8 updates already"),
        (0, r"no intact checkpoint after 0 updates"),
        (2, r"after 4, 8 updates\. The run deletes older ones \(core\.checkpoint_keep_last = 2\)"),
    ],
)
def test_impossible_rewinds_are_refused_and_change_nothing(
    run: CompletedRun, updates: int, reason: str
) -> None:
    before = content(run)
    with pytest.raises(ConfigurationError, match=reason):
        plan_rewind(run.store, RewindRequest(updates=updates), 2, "again")
    assert content(run) == before


def test_a_run_that_deletes_no_checkpoint_is_not_told_to_keep_more(run: CompletedRun) -> None:
    document = run.store.read_json(layout.RESOLVED_CONFIG)
    document["core"] |= {"checkpoint_keep_last": None}
    run.store.write_json(layout.RESOLVED_CONFIG, document)
    with pytest.raises(ConfigurationError, match=r"checkpoints after 4, 8 updates$"):
        plan_rewind(run.store, RewindRequest(updates=2), 2, "again")


def test_a_damaged_checkpoint_is_no_target(run: CompletedRun) -> None:
    path = f"{run.checkpoint_of(3)}/state.json"
    run.store.write_bytes(path, b"")
    with pytest.raises(
        ConfigurationError, match=r"no intact checkpoint after 4 .* after 8 updates"
    ):
        plan_rewind(run.store, TO_FOUR, 2, "again")


def test_a_rewind_sets_aside_what_lies_after_it_and_the_books_stay_clean(run: CompletedRun) -> None:
    before = content(run)
    rewound(run)
    after = content(run)
    aside = f"{layout.rewound_folder(2)}/"
    # Nothing is deleted: every file is where it was or aside, rows included.
    for path, data in before.items():
        kept = after.get(aside + path, after.get(path))
        if path not in (layout.WORKFLOW_JSON, layout.LATEST):
            assert kept == data, path
    moved = {path.removeprefix(aside) for path in after if path.startswith(aside)}
    assert {f"rollouts/000000{u}.e1.{end}" for u in range(4, 8) for end in ("json", "parquet")} == {
        path for path in moved if path.startswith("rollouts/0")
    }
    assert {path.split("/")[2][:15] for path in moved if path.startswith("checkpoints/core/")} == {
        "rollout_0000007"
    }
    assert "rollouts/eval_0000008.e1.parquet" in moved
    assert "rollouts/eval_0000004.e1.parquet" in after
    assert "export-hf/model.safetensors" in moved
    rows = run.store.read_jsonl(layout.METRICS).rows
    assert max(row["update"] for row in rows if row["kind"] == "eval") == 4
    newest = newest_checkpoint(run.store)
    assert newest is not None
    assert newest.update == 3
    assert run.store.read_json(layout.LATEST)["folder"] == newest.folder
    state = run.store.read_json(layout.WORKFLOW_JSON)
    assert (state["status"], state["update"], "result" in state) == ("stopped", 4, False)
    books = audit(run.store.root)
    assert books.is_clean, books.verdict
    assert books.updates == 4
    assert any("rewound to 4 updates under epoch 2, 4 set aside" in note for note in books.notes)
    assert (
        books.notes[-1] == "4 finished updates were undone by a rewind or rebuild, to be done again"
    )


def test_a_rewound_run_that_was_trained_to_its_end_is_proved_complete(run: CompletedRun) -> None:
    rewound(run)
    run.restore_trainer()
    for update in range(4, 8):
        run.updates(update, update)
        run.publish(update + 1)
    run.checkpoint()
    run.evaluate(8)
    run.export()
    run.write_state("complete", 8)
    found = verify(run.store.root)
    assert [check for check in found.checks if not check.holds] == []
    (updates,) = [check for check in found.checks if check.name == "updates"]
    assert updates.evidence.endswith("4 redone after a rebuild, rewound to 4 under epoch 2")
    books = audit(run.store.root)
    assert books.is_clean, books.verdict
    assert (books.updates, books.updates_redone) == (8, 4)


class Killed(BaseException):
    """The process ended there."""


def _kill_after(monkeypatch: pytest.MonkeyPatch, run: CompletedRun, calls: int) -> None:
    """End the process at its ``calls``-th change of the root."""
    left = [calls]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return change(*arguments)

        return call

    for name in ("rename", "write_bytes", "create_exclusive"):
        monkeypatch.setattr(run.store, name, counted(getattr(run.store, name)))


def test_a_kill_at_any_point_leaves_the_old_or_the_new_state(
    finished: CompletedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finished.copied_to(tmp_path / "whole")
    rewound(whole)
    seen: set[int] = set()
    for calls in range(200):
        run = finished.copied_to(tmp_path / f"killed{calls}")
        run.claim()
        old_files = content(run)
        with monkeypatch.context() as patch:
            _kill_after(patch, run, calls)
            try:
                rewind_once(run.store, TO_FOUR, run.epoch, "again")
                settle_rewinds(run.store, "export-hf", run.epoch)
                done = True
            except Killed:
                done = False
        books = audit(run.store.root)
        assert books.is_clean, (calls, books.verdict)
        newest = newest_checkpoint(run.store)
        assert newest is not None
        assert newest.update + 1 == books.updates == max(intact_checkpoints(run.store))
        seen.add(books.updates)
        if not read_rewinds(run.store):
            assert books.updates == 8
            assert content(run) == old_files
        elif not done:
            assert has_unsettled(run.store)
            # The same workflow's retry, or any later claim, finishes it.
            run.claim()
            rewind_once(run.store, TO_FOUR, run.epoch, "again")
            settle_rewinds(run.store, "export-hf", run.epoch)
        if read_rewinds(run.store):
            assert [each.epoch for each in read_rewinds(run.store)] == [2]
            assert _lasting(run) == _lasting(whole), calls
        shutil.rmtree(run.store.root)
        if done:
            break
    assert done
    assert seen == {4, 8}


def _train_on(run: CompletedRun, files: dict[str, bytes]) -> None:
    """A new owner rewinds, trains an update again and exports; ``files``: as it leaves them."""
    rewound(run)
    run.store.append_jsonl(layout.METRICS, {"kind": "train", "update": 4, "epoch": run.epoch})
    run.store.append_jsonl(layout.PUBLICATION, {"rollout_id": 4, "version": 5})
    run.store.write_bytes("export-hf/model.safetensors", b"new")
    run.store.write_bytes(layout.eval_receipt(6, "key"), b"{}")
    run.store.write_bytes(layout.REPORT, b"new")
    run.store.write_json(layout.LATEST, {"rollout_id": 4})
    run.store.write_json(layout.WORKFLOW_JSON, {"status": "training"})
    aside = layout.REWOUND
    files |= {path: data for path, data in content(run).items() if not path.startswith(aside)}


def _stall_after(
    monkeypatch: pytest.MonkeyPatch, run: CompletedRun, calls: int, meanwhile: Callable[[], None]
) -> None:
    """Let ``meanwhile`` happen between the ``calls``-th change of the root and the next."""
    left = [calls]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = change(*arguments)
            left[0] -= 1
            if not left[0]:
                meanwhile()
            return answer

        return call

    for name in ("rename", "write_bytes"):
        monkeypatch.setattr(run.store, name, counted(getattr(run.store, name)))


def test_a_claimer_that_stood_still_touches_nothing_of_the_next_owner(
    finished: CompletedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for calls in range(1, 200):
        run = finished.copied_to(tmp_path / f"stalled{calls}")
        run.store.write_bytes(layout.REPORT, b"old")
        run.claim()
        stalled = run.epoch
        rewind_once(run.store, TO_FOUR, stalled, "again")
        new: dict[str, bytes] = {}
        with monkeypatch.context() as patch, contextlib.suppress(StaleFence):
            _stall_after(patch, run, calls, partial(_train_on, run, new))
            settle_rewinds(run.store, "export-hf", stalled)
        if not new:
            break
        after = content(run)
        assert {path: after.get(path) for path in new} == new, calls
        assert not has_unsettled(run.store)
        shutil.rmtree(run.store.root)
    assert calls > 10


def _lasting(run: CompletedRun) -> dict[str, Any]:
    """Every file but those of leases and those that hold a time."""
    timed = (layout.REWIND_JSON, layout.REWIND_SETTLED)
    root = run.store.root.encode()
    return {
        path: data.replace(root, b"ROOT")
        for path, data in content(run).items()
        if not path.startswith(layout.LEASE) and not path.endswith(timed)
    }


def test_a_rewind_that_was_cut_off_is_told(
    run: CompletedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.claim()
    with monkeypatch.context() as patch:
        _kill_after(patch, run, 3)
        rewind_once(run.store, TO_FOUR, run.epoch, "again")
        with pytest.raises(Killed):
            settle_rewinds(run.store, "export-hf", run.epoch)
    (updates,) = [each for each in verify(run.store.root).checks if each.name == "updates"]
    problem = "what the rewind undid is not set aside yet"
    assert problem in [flaw.problem for flaw in updates.flaws]


def test_a_claimer_that_was_overtaken_rewinds_nothing(run: CompletedRun) -> None:
    run.claim()
    late = run.epoch
    run.claim()
    with pytest.raises(StaleFence):
        rewind_once(run.store, TO_FOUR, late, "late")
    assert read_rewinds(run.store) == []


def test_what_an_older_epoch_commits_late_does_not_count(run: CompletedRun) -> None:
    folder = run.checkpoint_of(7)
    saved = shutil.copytree(Path(run.store.root) / folder, Path(run.store.root) / "late")
    rewound(run)
    saved.rename(Path(run.store.root) / folder)
    newest = newest_checkpoint(run.store)
    assert newest is not None
    assert newest.update == 3
    assert audit(run.store.root).updates == 4


def test_a_torn_row_is_kept_and_rows_of_no_update_stay(run: CompletedRun) -> None:
    rel = layout.DRIVER_TIMING
    path = Path(run.store.root) / rel
    rows = [{"rollout_id": None, "stage": "placement"}, {"rollout_id": 3}, {"rollout_id": 4}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"rollout_id": 5, "st')
    whole = path.read_text()
    rewound(run)
    assert path.read_text() == "".join(json.dumps(row) + "\n" for row in rows[:2]) + (
        '{"rollout_id": 5, "st'
    )
    assert (Path(run.store.root) / layout.rewound_folder(2) / rel).read_text() == whole


def test_the_module_moves_nothing_that_it_does_not_name(run: CompletedRun) -> None:
    run.store.write_bytes("checkpoints/core/mine/notes.txt", b"kept")
    run.store.write_bytes("evaluation/notes.json", b"{}")
    rewound(run)
    assert run.store.exists("checkpoints/core/mine/notes.txt")
    assert run.store.exists("evaluation/notes.json")


def in_a_bucket(run: CompletedRun) -> CompletedRun:
    """The run as an object store would hold it: a part for each row that was appended."""
    other = copy.copy(run)
    other.store = Store(f"memory://bucket/{uuid.uuid4().hex}")
    for rel, data in content(run).items():
        if rel.endswith(".jsonl") and rel.startswith("checkpoints/"):
            for row in run.store.read_jsonl(rel).rows:
                other.store.append_jsonl(rel, row)
        else:
            other.store.write_bytes(rel, data)
    return other


def test_rows_in_a_bucket_are_read_together_and_set_aside(
    run: CompletedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = in_a_bucket(run)
    rel = layout.ROLLOUT_FLOW
    for number in range(40):
        far.store.append_jsonl(rel, {"rollout_id": number % 8})
    single: list[str] = []
    read_one = ObjectStore.read

    def read(self: ObjectStore, path: str, end: int | None = None) -> bytes:
        single.append(path)
        return read_one(self, path, end)

    monkeypatch.setattr(ObjectStore, "read", read)
    rewound(far)
    assert not [path for path in single if ".parts/" in path]
    rewound(run)
    for name in (layout.METRICS, layout.PUBLICATION, layout.DRIVER_TIMING):
        assert far.store.read_jsonl(name).rows == run.store.read_jsonl(name).rows
    kept = [row["rollout_id"] for row in far.store.read_jsonl(rel).rows]
    assert kept == [0, 1, 2, 3] * 5
    aside = far.store.read_jsonl(f"{layout.rewound_folder(far.epoch)}/{rel}").rows
    assert [row["rollout_id"] for row in aside] == [4, 5, 6, 7] * 5
    assert not has_unsettled(far.store)
    assert audit(far.store.root).updates == 4
