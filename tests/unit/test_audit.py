"""Prompt accounting: what each kind of run looks like, and every planted fault is found."""

import uuid

import pytest
from synthetic_run import TIED, SyntheticRun

from activities.analysis.audit import Audit, audit
from activities.analysis.books import IN_LEDGER, NOT_RECORDED
from activities.analysis.lives import Fate
from activities.storage import layout
from models.errors import ConfigurationError
from models.prompt import DataState
from models.rollout import CollectionManifest


@pytest.fixture
def run() -> SyntheticRun:
    return SyntheticRun(f"memory://{uuid.uuid4().hex}/root")


def books_of(run: SyntheticRun) -> Audit:
    books = audit(run.store.root)
    fates = [books.count(fate) for fate in Fate]
    assert sum(fates) == len(books.lives)
    assert [life.group_index for life in books.lives] == list(range(len(books.lives)))
    assert sum(books.prompts_dropped.values()) == books.count(Fate.DROPPED)
    return books


def counts(books: Audit) -> tuple[int, int, int, int, int]:
    """Drawn, trained, dropped, pending, missing."""
    return (len(books.lives), *(books.count(fate) for fate in Fate))


def test_a_complete_run_accounts_for_every_prompt(run):
    run.updates(0, 2, dropped=1)
    run.checkpoint()
    books = books_of(run)
    assert books.run_id == "train/made"
    assert books.updates == 3
    assert counts(books) == (15, 12, 3, 0, 0)
    assert books.prompts_dropped == {TIED: 3}
    # five draws a collection, the first one ties
    assert [life.group_index for life in books.lives if life.fate is Fate.DROPPED] == [0, 5, 10]
    assert [life.trained for life in books.lives[6:10]] == [[(1, 2)]] * 4
    reference = run.source_at(DataState()).draw(15)
    assert [(life.prepared_sample_id, life.epoch_id) for life in books.lives] == [
        (draw.prepared_sample_id, draw.epoch_id) for draw in reference
    ]
    assert books.cursor.startswith("checkpoints/core/rollout_0000002.e1")
    assert books.notes == ()
    assert books.is_clean
    assert books.verdict == (
        "accounted for: 15 prompts drawn, none missing, none doubled; 3 updates, each applied once"
    )


def test_passes_over_the_data_are_told_apart():
    run = SyntheticRun(f"memory://{uuid.uuid4().hex}/root", num_prompts=6)
    run.updates(0, 3)
    books = books_of(run)
    assert counts(books) == (16, 16, 0, 0, 0)
    assert [life.epoch_id for life in books.lives] == [0] * 6 + [1] * 6 + [2] * 4
    assert books.is_clean


def test_a_running_run_has_a_collection_ahead(run):
    run.updates(0, 1)
    run.collect(2, dropped=1)
    books = books_of(run)
    assert books.updates == 2
    assert counts(books) == (13, 8, 1, 4, 0)
    assert {each.reason for each in books.lives if each.fate is Fate.PENDING} == {
        "collected for update 2"
    }
    assert books.cursor == "rollouts/0000002.e1.json"
    assert books.notes == ("updates 0 to 1 are in no checkpoint yet",)
    assert books.is_clean


def test_draws_of_an_unfinished_collection_wait_in_the_ledger(run):
    run.updates(0, 1)
    run.source.draw(3)
    run.checkpoint()
    books = books_of(run)
    assert counts(books) == (11, 8, 0, 3, 0)
    assert {each.reason for each in books.lives[8:]} == {IN_LEDGER}


def test_a_run_that_has_drawn_nothing(run):
    books = books_of(run)
    assert counts(books) == (0, 0, 0, 0, 0)
    assert books.verdict == "accounted for: no prompt was drawn yet"
    assert books.is_clean


def test_updates_after_a_lost_trainer_are_redone_not_doubled(run):
    run.updates(0, 2)
    run.checkpoint()
    run.updates(3, 5, dropped=1)
    run.lose_trainer()
    run.updates(3, 5)
    books = books_of(run)
    assert (books.updates, books.updates_redone, books.updates_doubled) == (6, 3, 0)
    assert counts(books) == (24, 24, 0, 0, 0)
    assert books.lives[13].abandoned == [(3, 1)]
    assert books.is_clean


def test_in_the_middle_of_a_rewind_the_undone_updates_do_not_count(run):
    run.updates(0, 2)
    run.checkpoint()
    run.updates(3, 5)
    run.lose_trainer()
    run.collect(3)
    books = books_of(run)
    assert (books.updates, books.updates_redone) == (3, 0)
    assert counts(books) == (16, 12, 0, 4, 0)
    assert "3 finished updates were undone by a rebuild, to be done again" in books.notes
    run.train(run.collect(3))
    books = books_of(run)
    assert (books.updates, books.updates_redone) == (4, 1)
    assert counts(books) == (16, 16, 0, 0, 0)
    assert books.is_clean


def test_a_late_row_of_an_undone_epoch_changes_nothing(run):
    run.updates(0, 0)
    run.checkpoint()
    run.updates(1, 3)
    undone = run.position()
    run.lose_trainer()
    run.updates(1, 1)
    run.row(2, 1, "f" * 64, 3)
    books = books_of(run)
    assert undone.sample_group_index == 16
    assert books.updates == 2
    assert counts(books) == (8, 8, 0, 0, 0)


def test_a_retried_row_is_no_double(run):
    run.updates(0, 1)
    run.row(1, 1, run.trained_sha256, 2)
    books = books_of(run)
    assert (books.updates, books.updates_redone, books.updates_doubled) == (2, 0, 0)
    assert books.is_clean


@pytest.mark.parametrize("dropped", [0, 2])
def test_an_update_whose_report_was_lost_is_inferred(run, dropped):
    run.updates(0, 1)
    run.train(run.collect(2, dropped), recorded=False)
    run.lose_producer()
    run.updates(3, 3)
    run.checkpoint()
    books = books_of(run)
    assert (books.updates, books.updates_unrecorded) == (4, 1)
    assert counts(books) == (16 + dropped, 16, dropped, 0, 0)
    assert any("no row of updates 2" in note for note in books.notes)
    assert books.is_clean


def test_a_collection_that_an_older_epoch_made_and_nobody_trained(run):
    run.updates(0, 1)
    run.collect(2, dropped=1)
    run.lose_producer()
    run.updates(2, 3)
    books = books_of(run)
    assert counts(books) == (16, 16, 0, 0, 0)
    assert books.lives[9].abandoned == [(2, 1)]
    assert books.is_clean


def test_a_prompt_that_falls_out_of_the_ledger_is_missing(run):
    run.updates(0, 1)
    run.source.draw(3)
    state = run.source.snapshot(1)
    run.checkpoint()
    lost = state.pending[1]
    run.source = run.source_at(
        state.model_copy(update={"pending": (state.pending[0], state.pending[2])})
    )
    run.claim()
    run.updates(2, 3)
    books = books_of(run)
    assert books.count(Fate.MISSING) == 1
    life = books.lives[lost.group_index]
    assert life.fate is Fate.MISSING
    assert not books.is_clean
    assert books.verdict == "not accounted for: 1 prompts missing"


def test_a_missing_prompt_is_named_by_an_older_ledger(run):
    run.updates(0, 0)
    drawn = run.source.draw(2)
    first = run.collect(1)  # its ledger names the two that are out
    assert [draw.group_index for draw in first.data_after.pending] == [4, 5]
    run.train(first)
    state = first.data_after.model_copy(update={"pending": first.data_after.pending[1:]})
    run.source = run.source_at(state)
    run.claim()
    run.updates(2, 2)
    (life,) = [each for each in books_of(run).lives if each.fate is Fate.MISSING]
    assert life.group_index == drawn[0].group_index
    assert life.prepared_sample_id == drawn[0].prepared_sample_id


def test_groups_trained_in_two_updates_are_doubled(run):
    run.updates(0, 1)
    stale = run.position()
    run.updates(2, 2)
    run.source = run.source_at(stale)  # the trainer is kept, the data position is not
    run.claim()
    run.updates(3, 3)
    books = books_of(run)
    assert books.prompts_doubled == 4
    assert counts(books) == (12, 12, 0, 0, 0)
    assert books.lives[8].trained == [(2, 3), (3, 4)]
    assert books.verdict == "not accounted for: 4 prompts doubled"


def test_a_prompt_trained_under_two_group_indices_of_one_pass_is_doubled(run):
    run.updates(0, 0)
    state = run.position().model_copy(update={"sample_offset": 2})
    run.source = run.source_at(state)
    run.claim()
    run.updates(1, 1)
    books = books_of(run)
    assert books.prompts_doubled == 2
    assert [each.group_index for each in books.lives if each.doubled] == [2, 3, 4, 5]


def test_a_trained_prompt_that_the_ledger_still_owes_is_doubled(run):
    run.updates(0, 0)
    manifest = run.collect(1)
    owed = run.source.snapshot(0).pending[:1]
    after = manifest.data_after.model_copy(update={"pending": owed})
    run.write_manifest(manifest.model_copy(update={"data_after": after}))
    run.train(manifest)
    books = books_of(run)
    assert books.prompts_doubled == 1
    assert books.lives[owed[0].group_index].doubled


def test_two_different_rows_of_an_update_in_one_epoch_are_a_double(run):
    run.updates(0, 2)
    run.row(1, 1, "f" * 64, 3)
    books = books_of(run)
    assert books.updates_doubled == 1
    assert "1 updates doubled" in books.verdict


def test_more_steps_than_an_update_can_take_are_a_double(run):
    run.updates(0, 1)
    run.row(2, 1, run.collect(2).collection.sha256, 4)  # one step an update: 3 is the most
    books = books_of(run)
    assert books.updates_doubled == 1
    assert "applied twice: updates 2" in books.notes


def test_updates_without_a_step_are_no_double(run):
    first, second = run.collect(0), run.collect(1)
    run.row(0, 1, first.collection.sha256, 0)
    run.row(1, 1, second.collection.sha256, 1)
    assert books_of(run).is_clean


def without_names(run: SyntheticRun, manifest: CollectionManifest) -> None:
    """Rewrite a manifest as it was when drops were counted only."""
    place = manifest.collection.update, manifest.collection.epoch
    document = manifest.model_dump(mode="json")
    del document["dropped"]
    run.store.write_json(layout.collection_manifest(*place), document)


@pytest.mark.parametrize("lost", [0, 1])
def test_old_manifests_count_drops_without_naming_them(run, lost):
    for update in range(2):
        manifest = run.collect(update, dropped=2)
        without_names(run, manifest)
        run.train(manifest)
    if lost:
        run.source.draw(1)
        state = run.source.snapshot(1).model_copy(update={"pending": ()})
        run.source = run.source_at(state)
        run.claim()
        run.updates(2, 2)
    books = books_of(run)
    assert books.prompts_dropped == {TIED: 4}
    assert books.count(Fate.MISSING) == lost
    assert any("nobody can tell" in note for note in books.notes) == bool(lost)


def test_unnamed_drops_of_two_reasons_leave_the_reason_open(run):
    manifest = run.collect(0, dropped=2)
    both = {TIED: 1, "verifier_error": 1}
    counted = manifest.collection.counts.model_copy(update={"filtered_groups": both})
    collection = manifest.collection.model_copy(update={"counts": counted})
    old = manifest.model_copy(update={"collection": collection})
    without_names(run, old)
    run.train(old)
    books = books_of(run)
    assert books.prompts_dropped == both
    assert [life.reason for life in books.lives[:2]] == [NOT_RECORDED] * 2


def test_a_drop_that_a_manifest_counts_and_does_not_name_excuses_nobody(run):
    manifest = run.collect(0, dropped=2)
    run.write_manifest(manifest.model_copy(update={"dropped": manifest.dropped[:1]}))
    run.train(manifest)
    books = books_of(run)
    assert [life.fate for life in books.lives[:2]] == [Fate.DROPPED, Fate.MISSING]
    assert not books.is_clean


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_lost_collection_leaves_its_prompts_open(run, damage):
    run.updates(0, 3)
    run.checkpoint()
    path = layout.collection_parquet(2, 1)
    data = run.store.read_bytes(path)
    run.store.remove_tree(path)
    if damage == "cut":
        run.store.write_bytes(path, data[:100])
    books = books_of(run)
    assert counts(books) == (16, 12, 0, 0, 4)
    assert books.updates_unreadable == 1
    assert any(path in note for note in books.notes)
    assert not books.is_clean


def test_a_lost_manifest_is_made_up_for_by_the_digest(run):
    run.updates(0, 3)
    run.store.remove_tree(layout.collection_manifest(3, 1))
    books = books_of(run)
    assert counts(books) == (16, 16, 0, 0, 0)
    assert any("no manifest of update 3" in note for note in books.notes)
    assert books.is_clean


def test_lost_rows_are_made_up_for_by_a_checkpoint(run):
    run.updates(0, 2)
    run.checkpoint()
    run.updates(3, 3)
    run.store.remove_tree(f"{layout.UPDATES}.parts")
    books = books_of(run)
    assert (books.updates, books.updates_unrecorded) == (3, 3)
    assert counts(books) == (16, 12, 0, 4, 0)
    assert books.is_clean


def test_a_checkpoint_of_an_undone_line_is_not_asked(run):
    run.updates(0, 0)
    run.checkpoint()
    run.updates(1, 1)
    run.source.draw(2)
    run.checkpoint()
    run.trained = 0  # somebody goes back to the older one
    run.source = run.source_at(
        DataState(sample_offset=4, sample_group_index=4, sample_index=8, train_sha256="a" * 64)
    )
    run.claim()
    run.updates(1, 2)
    books = books_of(run)
    assert counts(books) == (12, 12, 0, 0, 0)
    assert books.cursor == "rollouts/0000002.e2.json"


@pytest.mark.parametrize("cut", [False, True])
def test_no_file_is_needed_to_answer(tmp_path, cut):
    """Any one file gone or torn: an answer, and never a loss or double that did not happen."""
    run = SyntheticRun(str(tmp_path / "root"))
    run.updates(0, 1, dropped=1)
    run.checkpoint()
    run.lose_trainer()
    run.updates(2, 3, dropped=1)
    run.checkpoint()
    run.collect(4)
    files = [path for path in (tmp_path / "root").rglob("*") if path.is_file()]
    for path in files:
        data = path.read_bytes()
        path.unlink()
        if cut:
            path.write_bytes(data[: len(data) // 2])
        books = books_of(run)
        if not path.name.endswith(".parquet"):
            assert (books.prompts_doubled, books.updates_doubled) == (0, 0), path
        path.write_bytes(data)
    assert books_of(run).is_clean


def test_a_root_without_a_run_is_refused(tmp_path):
    for root in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match="holds no run"):
            audit(str(root))
