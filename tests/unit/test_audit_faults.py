"""Faults that leave every count right: another prompt's number, half a group, a lost step."""

import uuid

import pytest
from synthetic_async import SyntheticAsyncRun
from synthetic_run import SyntheticRun, group_of

from activities.analysis.audit import Audit, audit
from activities.analysis.lives import Fate
from activities.rollout.collection_file import write_collection
from activities.storage import layout
from models.prompt import DataState, PromptDraw
from models.rollout import CollectionManifest
from models.sample import SampleGroup


@pytest.fixture
def run() -> SyntheticRun:
    return SyntheticRun(f"memory://{uuid.uuid4().hex}/root")


@pytest.fixture
def free() -> SyntheticAsyncRun:
    return SyntheticAsyncRun(f"memory://{uuid.uuid4().hex}/root", batch=2)


def books_of(run: SyntheticRun) -> Audit:
    return audit(run.store.root)


def rewrite(
    run: SyntheticRun, manifest: CollectionManifest, groups: list[SampleGroup]
) -> CollectionManifest:
    """The same collection with another file, committed as if it were the right one."""
    collection = manifest.collection
    sha256 = write_collection(run.store, collection.uri, groups)
    changed = manifest.model_copy(
        update={"collection": collection.model_copy(update={"sha256": sha256})}
    )
    run.write_manifest(changed)
    return changed


def test_a_group_that_answers_another_prompt_is_found(free: SyntheticAsyncRun) -> None:
    """The ledger handed out one prompt under the number, the trained file holds another."""
    free.submit(3)
    for draw in list(free.making[:2]):
        free.finish(draw)
    free.train(free.collect(0))  # its ledger names group 2
    (owed,) = free.making
    foreign = owed.model_copy(update={"prepared_sample_id": "task:train:9999"})
    free.finish(owed)
    free.submit()
    free.finish(free.making[0])
    manifest = free.collect(1)
    kept = [group_of(foreign, 1), group_of(draw_of(free, 3), 1)]
    free.train(rewrite(free, manifest, kept))
    books = books_of(free)
    assert books.prompts_mixed_up == 1
    assert [life.group_index for life in books.lives if life.is_wrong] == [2]
    assert books.verdict == "not accounted for: 1 prompts under another one's number"


def draw_of(run: SyntheticRun, group_index: int) -> PromptDraw:
    """What was handed out under that number."""
    return run.source_at(DataState()).draw(group_index + 1)[group_index]


def test_a_group_that_lost_a_sample_is_found(run: SyntheticRun) -> None:
    run.updates(0, 0)
    manifest = run.collect(1)
    groups = [group_of(draw_of(run, index), 1) for index in range(4, 8)]
    groups[2].samples.pop()
    run.train(rewrite(run, manifest, groups))
    books = books_of(run)
    assert books.groups_incomplete == 1
    assert "1 groups trained with samples missing" in books.verdict
    assert [life.group_index for life in books.lives if life.is_wrong] == [6]
    assert books.lives[6].fate is Fate.TRAINED


def test_a_trainer_that_forgot_steps_is_found(run: SyntheticRun) -> None:
    """Nobody rebuilt it, and its version falls: a step that the line counts is not in it."""
    run.updates(0, 2)
    run.row(3, 1, run.collect(3).collection.sha256, 2)
    books = books_of(run)
    assert books.updates_lost == 1
    assert "1 updates after which the policy version fell" in books.verdict
    assert "policy version fell: updates 3" in books.notes


def test_a_ledger_that_owes_what_its_cursor_will_hand_out_is_found(run: SyntheticRun) -> None:
    run.updates(0, 0)
    manifest = run.collect(1)
    beyond = run.source_at(manifest.data_after).draw(1)
    after = manifest.data_after.model_copy(update={"pending": tuple(beyond)})
    run.write_manifest(manifest.model_copy(update={"data_after": after}))
    run.train(manifest)
    books = books_of(run)
    assert books.prompts_doubled == 1
    assert books.lives[beyond[0].group_index].doubled


@pytest.mark.parametrize("fault", ["lost", "owed again"])
def test_a_checkpoint_that_a_resume_could_not_trust_is_found(
    free: SyntheticAsyncRun, fault: str
) -> None:
    """The run itself goes on with the right ledger; who resumes takes the checkpoint's."""
    free.submit(5)
    for draw in list(free.making[:2]):
        free.finish(draw)
    free.train(free.collect(0))
    right = free.source.snapshot(0)
    pending = right.pending[1:] if fault == "lost" else (draw_of(free, 0), *right.pending)
    index = right.pending[0].group_index if fault == "lost" else 0
    source, free.source = free.source, free.source_at(right.model_copy(update={"pending": pending}))
    free.checkpoint()
    free.source = source
    for draw in list(free.making[:2]):
        free.finish(draw)
    free.train(free.collect(1))
    books = books_of(free)
    assert (books.count(Fate.MISSING), books.prompts_doubled) == (0, 0)
    assert books.prompts_wrong_in_checkpoint == 1
    assert "1 prompts that a resume would lose or train again" in books.verdict
    assert any(f"groups {index}" in note for note in books.notes)
    assert layout.CHECKPOINT_FOLDERS in " ".join(books.notes)
