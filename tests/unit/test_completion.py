"""Proving a run complete from its root: what holds, and each way in which it does not."""

import hashlib
from pathlib import Path

import pytest

from activities.analysis.completion import numbers
from activities.analysis.completion_checks import Verification, verify
from activities.storage import layout
from configs.load import resolve_document
from models.errors import ConfigurationError
from tests.support.completed_run import CompletedRun, safetensors_file
from tests.support.synthetic_run import SyntheticRun


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    return CompletedRun(str(tmp_path_factory.mktemp("made") / "root"))


@pytest.fixture
def run(finished: CompletedRun, tmp_path: Path) -> CompletedRun:
    return finished.copied_to(tmp_path / "root")


def flaws_of(verification: Verification) -> list[tuple[str, str, str]]:
    """(check, path relative to the root, problem) of every flaw."""
    for check in verification.checks:
        assert all(flaw.remedy and flaw.path for flaw in check.flaws)
    return [
        (check.name, flaw.path.removeprefix(verification.root + "/"), flaw.problem)
        for check in verification.checks
        for flaw in check.flaws
    ]


def only_flaw(run: CompletedRun) -> tuple[str, str, str]:
    verification = verify(run.store.root)
    assert not verification.is_complete
    (flaw,) = flaws_of(verification)
    return flaw


def test_complete_run_holds_in_every_check(run: CompletedRun) -> None:
    verification = verify(run.store.root, run_id="train/made")
    assert flaws_of(verification) == []
    assert verification.is_complete
    assert verification.export == "export-hf"
    evidence = {check.name: check.evidence for check in verification.checks}
    assert evidence["updates"] == "8 of 8, policy version 8"
    assert (
        evidence["evaluations"] == "3 expected, after 0, 4, 8 updates, 3 samples each, by SHA-256"
    )
    assert evidence["checkpoints"].startswith("2 of updates 3, 7, expected 3, 7; 4 files, ")
    assert evidence["collections"] == "8 with 64 samples, by SHA-256"


def test_flipped_byte_in_a_checkpoint(run: CompletedRun) -> None:
    path = f"{run.checkpoint_of(3)}/state.json"
    data = bytearray(run.store.read_bytes(path))
    data[0] ^= 1
    run.store.write_bytes(path, bytes(data))
    check, where, problem = only_flaw(run)
    assert (check, where) == ("checkpoints", path)
    assert "other content" in problem


def test_torn_checkpoint_file(run: CompletedRun) -> None:
    path = f"{run.checkpoint_of(3)}/state.json"
    size = run.store.size(path)
    run.store.write_bytes(path, run.store.read_bytes(path)[:-1])
    problem = f"torn: {size - 1} bytes instead of the recorded {size}"
    assert only_flaw(run) == ("checkpoints", path, problem)


def test_missing_checkpoint_file(run: CompletedRun) -> None:
    path = f"{run.checkpoint_of(3)}/state.json"
    run.store.remove_tree(path)
    assert only_flaw(run) == ("checkpoints", path, "missing")


@pytest.mark.parametrize("content", [None, b'{"schema_version": 2'])
def test_checkpoint_without_a_whole_marker(run: CompletedRun, content: bytes | None) -> None:
    path = f"{run.checkpoint_of(3)}/{layout.COMPLETE}"
    if content is None:
        run.store.remove_tree(path)
    else:
        run.store.write_bytes(path, content)
    check, where, problem = only_flaw(run)
    assert (check, where) == ("checkpoints", path)
    assert problem.startswith("missing" if content is None else "unreadable")


def test_torn_save_of_an_update_that_is_saved_elsewhere_is_no_flaw(run: CompletedRun) -> None:
    leftover = f"{layout.CHECKPOINT_FOLDERS}/rollout_0000003.e1u4a999/state.json"
    run.store.write_bytes(leftover, b"torn")
    assert verify(run.store.root).is_complete


def test_missing_checkpoint(run: CompletedRun) -> None:
    run.store.remove_tree(run.checkpoint_of(3))
    flaw = ("checkpoints", layout.CHECKPOINT_FOLDERS, "no checkpoint after update 3")
    assert only_flaw(run) == flaw


def test_checkpoint_of_another_run(run: CompletedRun) -> None:
    path = f"{run.checkpoint_of(3)}/{layout.COMPLETE}"
    marker = run.store.read_json(path)
    run.store.write_json(path, marker | {"run_id": "train/other"})
    problem = "is a checkpoint of train/other, not of train/made"
    assert only_flaw(run) == ("checkpoints", path, problem)


@pytest.mark.parametrize("update", [2, 7])
def test_missing_update(run: CompletedRun, update: int) -> None:
    lines = run.store.read_bytes(layout.UPDATES).splitlines(keepends=True)
    run.store.write_bytes(layout.UPDATES, b"".join(lines[:update] + lines[update + 1 :]))
    flaw = ("updates", layout.UPDATES, f"no row of updates {update}")
    assert flaw in flaws_of(verify(run.store.root))


def test_run_that_ended_early(tmp_path: Path) -> None:
    run = CompletedRun(str(tmp_path / "root"), stop_after=4)
    found = flaws_of(verify(run.store.root))
    assert ("updates", layout.UPDATES, "no row of updates 4 to 7") in found
    assert ("checkpoints", layout.CHECKPOINT_FOLDERS, "no checkpoint after update 7") in found
    missing = "no row of the evaluation after 8 updates"
    assert ("evaluations", layout.METRICS, missing) in found


def test_soft_deadline_is_a_completion(tmp_path: Path) -> None:
    run = CompletedRun(str(tmp_path / "root"), stop_after=4)
    run.write_state("complete", 4, result={"stopped_for_time": True})
    assert flaws_of(verify(run.store.root)) == []


def test_lost_report_before_a_rebuild_is_no_missing_update(tmp_path: Path) -> None:
    run = SyntheticRun(str(tmp_path / "root"))
    run.updates(0, 1)
    run.train(run.collect(2), recorded=False)
    run.lose_producer()
    run.updates(3, 7)
    run.checkpoint()
    (updates,) = [each for each in verify(run.store.root).checks if each.name == "updates"]
    assert updates.holds


def test_missing_marker_of_a_collection(run: CompletedRun) -> None:
    path = layout.collection_manifest(2, 1)
    run.store.remove_tree(path)
    found = flaws_of(verify(run.store.root))
    assert ("collections", path, "missing: the marker of the collection of update 2") in found


def test_changed_collection(run: CompletedRun) -> None:
    path = layout.collection_parquet(2, 1)
    run.store.write_bytes(path, run.store.read_bytes(path) + b"\n")
    found = [flaw for flaw in flaws_of(verify(run.store.root)) if flaw[0] == "collections"]
    assert [each[1] for each in found] == [path]


def test_last_version_was_not_published(run: CompletedRun) -> None:
    lines = run.store.read_bytes(layout.PUBLICATION).splitlines(keepends=True)
    run.store.write_bytes(layout.PUBLICATION, b"".join(lines[:-1]))
    problem = "no publication of version 8, which the last update made"
    assert only_flaw(run) == ("publication", layout.PUBLICATION, problem)


def test_evaluation_without_its_samples(run: CompletedRun) -> None:
    path = layout.eval_parquet(4, 1)
    run.store.remove_tree(path)
    assert only_flaw(run) == ("evaluations", path, "missing")


def test_evaluation_with_fewer_samples(run: CompletedRun) -> None:
    run.store.write_json(layout.PREPARED_REPORT, {"eval_prompts": 5})
    found = flaws_of(verify(run.store.root))
    expected = [layout.eval_parquet(each, 1) for each in (0, 4, 8)]
    assert [each[1] for each in found] == expected
    assert {each[2] for each in found} == {"3 samples instead of 5"}


def test_flipped_byte_in_the_samples_of_an_evaluation(run: CompletedRun) -> None:
    path = layout.eval_parquet(4, 1)
    data = bytearray(run.store.read_bytes(path))
    recorded = hashlib.sha256(data).hexdigest()
    data[len(data) // 2] ^= 1
    run.store.write_bytes(path, bytes(data))
    found = hashlib.sha256(data).hexdigest()
    problem = f"other content: SHA-256 {found}, recorded {recorded}"
    assert only_flaw(run) == ("evaluations", path, problem)


def test_evaluations_of_a_run_that_recorded_no_digest(run: CompletedRun) -> None:
    rows = run.store.read_jsonl(layout.METRICS).rows
    run.store.remove_tree(layout.METRICS)
    for row in rows:
        if row.get("update") == 4:
            row = {name: value for name, value in row.items() if name not in ("uri", "sha256")}
        run.store.append_jsonl(layout.METRICS, row)
    verification = verify(run.store.root)
    assert verification.is_complete
    evidence = {check.name: check.evidence for check in verification.checks}
    assert evidence["evaluations"].endswith("; no digest recorded after 4 updates")


def test_root_of_another_run(run: CompletedRun) -> None:
    found = flaws_of(verify(run.store.root, run_id="train/other"))
    problem = "belongs to train/made, not to train/other"
    assert [each for each in found if each[0] == "owner"] == [
        ("owner", layout.WORKFLOW_JSON, problem),
        ("owner", layout.OWNER_JSON, problem),
    ]


def test_run_file_edited_in_the_root(run: CompletedRun) -> None:
    edited = run.document | {"data": run.document["data"] | {"seed": 99}}
    run.store.write_json(layout.RESOLVED_CONFIG, edited)
    check, where, problem = only_flaw(run)
    assert (check, where) == ("run file", layout.RESOLVED_CONFIG)
    assert problem.startswith("edited after the start")


def test_run_file_at_hand_means_another_run(run: CompletedRun) -> None:
    edited = run.document | {"data": run.document["data"] | {"seed": 99}}
    loaded = resolve_document(edited, origin="run.toml")
    found = flaws_of(verify(run.store.root, loaded=loaded))
    problem = "means another run than run-spec.json (different: data.seed)"
    assert found == [("run file", "run.toml", problem)]


def test_run_file_at_hand_may_differ_in_retries(run: CompletedRun) -> None:
    edited = run.document | {"launch": run.document["launch"] | {"max_retries": 7}}
    loaded = resolve_document(edited, origin="run.toml")
    assert verify(run.store.root, loaded=loaded).is_complete


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ("failed", "is failed: TrainerLost: gone"),
        ("stopped", "is stopped"),
        ("training", "is training, or was when everything was killed"),
    ],
)
def test_state_that_is_no_completion(run: CompletedRun, status: str, problem: str) -> None:
    error = {"error": "TrainerLost: gone"} if status == "failed" else {}
    run.write_state(status, 8, **error)
    assert only_flaw(run) == ("state", layout.WORKFLOW_JSON, problem)


def test_changed_prepared_data(run: CompletedRun) -> None:
    run.store.write_bytes(layout.TRAIN_JSONL, b"other\n")
    check, where, problem = only_flaw(run)
    assert (check, where) == ("prepared", layout.TRAIN_JSONL)
    assert problem.startswith("other content")


def test_export_is_unfinished_or_torn(run: CompletedRun) -> None:
    weights = "export-hf/model.safetensors"
    run.store.remove_tree("export-hf/.complete")
    assert only_flaw(run) == ("export", "export-hf/.complete", "missing")
    assert verify(run.store.root).export is None
    run.store.write_bytes("export-hf/.complete", b"")
    whole = safetensors_file(b"12345678")
    for torn in (whole[:-1], whole[:5], b""):
        run.store.write_bytes(weights, torn)
        check, where, problem = only_flaw(run)
        assert (check, where) == ("export", weights)
        assert f"torn: {len(torn)} bytes" in problem


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no run"):
        verify(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "text"),
    [([], "none"), ([3], "3"), ([0, 1], "0, 1"), ([0, 1, 2, 5, 7, 8], "0 to 2, 5, 7, 8")],
)
def test_numbers(values: list[int], text: str) -> None:
    assert numbers(values) == text
