"""The books of a fully async run, by hand: order, age, drops, a ledger far ahead."""

import io
import uuid

import pytest
from rich.console import Console
from synthetic_async import SyntheticAsyncRun
from synthetic_run import group_of

from activities.analysis.audit import Audit, audit
from activities.analysis.books import IN_LEDGER
from activities.analysis.lives import Fate, Reached
from activities.rollout.collection_file import GroupOutcome, read_outcomes, write_collection
from activities.storage import layout
from workers.cli.audit_report import as_json, chosen, life_json, show, show_lives


@pytest.fixture
def run() -> SyntheticAsyncRun:
    """Two groups an update."""
    return SyntheticAsyncRun(f"memory://{uuid.uuid4().hex}/root", batch=2)


def finish(run: SyntheticAsyncRun, *group_indices: int) -> None:
    for group_index in group_indices:
        run.finish(next(draw for draw in run.making if draw.group_index == group_index))


def fates(books: Audit) -> dict[int, Fate]:
    return {life.group_index: life.fate for life in books.lives}


def said(books: Audit) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show_lives(console, books, chosen(books, 100))
    show(console, books)
    return console.export_text()


def test_groups_are_consumed_in_the_order_in_which_they_finish(run):
    run.submit(6)
    finish(run, 4, 0, 5)
    run.train(run.collect(0))  # 4 and 0
    finish(run, 3)
    run.train(run.collect(1))  # 5 and 3
    books = audit(run.store.root)
    assert [each.group_index for each in books.trained] == [4, 0, 5, 3]
    assert books.lives[4].trained == [(0, 1)]
    assert books.lives[3].trained == [(1, 2)]
    assert {index for index, fate in fates(books).items() if fate is Fate.PENDING} == {1, 2}
    assert books.overtaken == 2  # 4 before 0 and 3, 5 before 3
    assert books.is_clean
    assert "2 before others that were drawn earlier" in said(books)


def test_a_ledger_that_is_several_collections_ahead(run):
    run.submit(9)
    finish(run, 8, 7, 6, 5)
    run.train(run.collect(0))
    books = audit(run.store.root)
    assert len(books.lives) == 9
    assert books.count(Fate.PENDING) == 7  # five in the making, two finished
    assert {life.reason for life in books.lives if life.fate is Fate.PENDING} == {IN_LEDGER}
    assert {life.reached for life in books.lives if life.fate is Fate.PENDING} == {Reached.DRAWN}
    assert books.is_clean


@pytest.mark.parametrize(
    ("reason", "reached"),
    [
        ("stale", Reached.SCORED),
        ("max_requeues", Reached.SCORED),
        ("zero_std_1.0", Reached.SCORED),
        ("verifier_error", Reached.GENERATED),
    ],
)
def test_drops_are_told_with_the_next_collection(run, reason, reached):
    run.submit(6)
    finish(run, 0, 1, 2, 3, 4)
    run.train(run.collect(0))
    run.drop(run.finished[0], reason)
    run.checkpoint()  # the drop is not told yet: the ledger owes it
    assert fates(audit(run.store.root))[2] is Fate.PENDING
    run.train(run.collect(1))
    books = audit(run.store.root)
    assert books.prompts_dropped == {reason: 1}
    assert (books.lives[2].fate, books.lives[2].reached) == (Fate.DROPPED, reached)
    assert books.is_clean


def test_a_drop_that_was_never_told_is_sampled_again_after_a_loss(run):
    run.submit(5)
    finish(run, 0, 1, 2, 3, 4)
    run.train(run.collect(0))
    run.drop(run.finished[0], "stale")
    run.lose_producer()
    run.submit(3)
    finish(run, 2, 3, 4)
    run.train(run.collect(1))
    books = audit(run.store.root)
    assert books.lives[2].trained == [(1, 2)]
    assert books.prompts_dropped == {}
    assert books.is_clean


def test_how_often_a_prompt_was_sampled_again(run):
    run.submit(4)
    finish(run, 0, 1, 2)
    run.go_stale(run.finished[2])
    run.fail(run.making[0])  # 3 waits before 2
    run.train(run.collect(0))
    run.submit(2)
    assert [draw.group_index for draw in run.making] == [3, 2]
    finish(run, 2)
    run.go_stale(run.finished[0])
    run.submit(1)
    finish(run, 3, 2)
    run.train(run.collect(1))
    books = audit(run.store.root)
    # 2 went stale twice; the only ledger that a file shows knew of the first time
    assert [(life.requeues, life.stale) for life in books.lives] == [(0, 0), (0, 0), (0, 1), (1, 0)]
    report = as_json(books)
    assert (report["prompts_requeued"], report["prompts_stale"]) == (1, 1)
    assert "sampled again 1 times for age" in said(books)
    assert life_json(books.lives[3])["requeues"] == 1


def test_a_producer_rebuilt_from_a_manifest_while_the_trainer_went_on(run):
    """The checkpoint of the same update has seen more draws than the rebuilt producer makes."""
    run.submit(3)
    finish(run, 0, 1, 2)
    run.train(run.collect(0))
    run.submit(6)
    run.checkpoint()
    books = audit(run.store.root)
    assert (len(books.lives), books.count(Fate.PENDING)) == (9, 7)
    run.lose_producer()  # its manifest knows 0, 1 and 2
    run.submit(3)
    finish(run, 4, 3)
    manifest = run.collect(1)
    books = audit(run.store.root)
    assert books.cursor == layout.collection_manifest(1, 2)
    assert (len(books.lives), books.count(Fate.PENDING)) == (5, 3)
    run.train(manifest)
    books = audit(run.store.root)
    assert fates(books)[2] is Fate.PENDING
    assert books.is_clean


def test_one_file_that_holds_a_group_twice_is_a_double(run):
    run.submit(2)
    first, second = run.making
    finish(run, 0, 1)
    run.train(run.commit(0, [first, first, second], acknowledged=[0, 1]))
    books = audit(run.store.root)
    assert books.prompts_doubled == 1
    assert books.lives[0].trained == [(0, 1), (0, 1)]
    assert chosen(books, 1)[0].group_index == 0
    assert "DOUBLED: in collections [0, 0]" in said(books)
    assert as_json(books)["prompts_trained"] == 2


def test_a_collection_ahead_that_holds_a_trained_group_is_a_double_before_it_is_trained(run):
    run.submit(3)
    finish(run, 0, 1, 2)
    first = run.finished[0]
    run.train(run.collect(0))
    run.source.forget(0)
    run.commit(1, [first, run.finished[0]], acknowledged=[2])
    books = audit(run.store.root)
    assert [life.group_index for life in books.lives if life.doubled] == [0]
    assert books.lives[0].fate is Fate.TRAINED
    assert books.lives[2].fate is Fate.PENDING


def test_what_a_file_holds_of_a_group(run):
    draws = run.source.draw(2)
    groups = [group_of(draws[1], 0, (float("nan"), 1.0)), group_of(draws[0], 0)]
    sha256 = write_collection(run.store, "a.parquet", [*groups, groups[1]])
    outcomes = read_outcomes(run.store, "a.parquet", sha256)
    assert outcomes == [
        GroupOutcome((1, draws[1].prepared_sample_id, 0), samples=2, scored=1, times=1),
        GroupOutcome((0, draws[0].prepared_sample_id, 0), samples=2, scored=2, times=2),
    ]
