"""Fully async histories: groups finish in any order, go stale, are dropped, processes die.

The books of a correct run are clean at every moment, and whatever is lost or done twice is found,
with the prompt named.
"""

import random
import uuid
from collections.abc import Callable

import pytest
from synthetic_async import SyntheticAsyncRun

from activities.analysis.audit import Audit, audit
from activities.analysis.lives import Fate
from models.rollout import DroppedGroup

BATCH = 3
MOST_OWNED = 4 * BATCH
"""In the making and finished: several collections' worth."""


def new_run() -> SyntheticAsyncRun:
    root = f"memory://{uuid.uuid4().hex}/root"
    return SyntheticAsyncRun(root, num_prompts=23, batch=BATCH)


def step(run: SyntheticAsyncRun, chance: random.Random) -> None:
    """Something of what the producer does between two collections."""
    event = chance.choice((*["submit"] * 4, *["finish"] * 4, "fail", "tie", "unscored", "stale"))
    if event == "submit" and len(run.making) + len(run.finished) < MOST_OWNED:
        run.submit(chance.randint(1, 3))
    elif event == "stale" and run.finished:
        draw = chance.choice(run.finished)
        if draw.stale < 2:
            run.go_stale(draw)
        else:
            run.drop(draw, chance.choice(("stale", "max_requeues")))
    elif run.making:
        draw = chance.choice(run.making)
        if event == "finish":
            run.finish(draw)
        elif event == "fail":
            run.fail(draw)
        elif event in ("tie", "unscored"):
            run.drop(draw, "zero_std_0.0" if event == "tie" else "verifier_error")


def fill(run: SyntheticAsyncRun, chance: random.Random, groups: int = BATCH) -> None:
    """Go on until a collection can be taken."""
    while len(run.finished) < groups:
        step(run, chance)


def live(run: SyntheticAsyncRun, chance: random.Random, events: int, *, checked: bool) -> None:
    """Updates, checkpoints and losses of any kind at any moment."""
    for _ in range(events):
        for _ in range(chance.randrange(12)):
            step(run, chance)
        event = chance.choice((*["update"] * 5, "checkpoint", "trainer", "producer", "worker"))
        if event == "checkpoint" and run.trained >= 0:
            run.checkpoint()
        elif event != "checkpoint":
            # a loss may come before the update, between its collection and its training, or
            # after the training and before its report
            how_far = (
                "reported" if event == "update" else chance.choice(("not", "collected", "trained"))
            )
            if how_far != "not":
                fill(run, chance)
                manifest = run.collect(run.trained + 1)
                if how_far != "collected":
                    run.train(manifest, recorded=how_far == "reported")
            if event == "trainer":
                run.lose_trainer()
            elif event == "producer":
                run.lose_producer()
            elif event == "worker":
                run.claim()
        if checked:
            books = audit(run.store.root)
            assert books.is_clean, (event, books.verdict, books.notes)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_dies_when_a_correct_run_is_clean(seed: int) -> None:
    run = new_run()
    live(run, random.Random(seed), 16, checked=True)


def test_the_histories_have_what_they_are_about() -> None:
    """Overtaken, stale, dropped and redone: else the test above would show little."""
    seen = {"overtaken": 0, "stale": 0, "redone": 0, "second pass": 0, "far ahead": 0}
    reasons: set[str] = set()
    for seed in range(10):
        run = new_run()
        live(run, random.Random(seed), 16, checked=False)
        books = audit(run.store.root)
        seen["overtaken"] += books.overtaken
        seen["stale"] += sum(life.stale for life in books.lives)
        seen["redone"] += books.updates_redone
        seen["second pass"] += any(life.epoch_id == 1 for life in books.lives)
        seen["far ahead"] += books.count(Fate.PENDING) > 2 * BATCH
        reasons |= set(books.prompts_dropped)
    assert all(seen.values()), seen
    assert reasons >= {"zero_std_0.0", "verifier_error"}


Plant = Callable[[SyntheticAsyncRun, random.Random], int]
"""Does something wrong and returns the group index that it was done to."""


def acknowledged_in_the_making(run: SyntheticAsyncRun, chance: random.Random) -> int:
    """Taken off the ledger as if it were consumed; no collection ever names it."""
    run.submit()
    draw = run.making.pop(chance.randrange(len(run.making)))
    run.source.assign(run.trained, [draw.group_index])
    return draw.group_index


def acknowledged_and_not_written(run: SyntheticAsyncRun, chance: random.Random) -> int:
    """Dequeued for a batch that did not hold it in the end."""
    fill(run, chance, BATCH + 1)
    draw = run.finished.pop(chance.randrange(len(run.finished)))
    run.source.assign(run.trained, [draw.group_index])
    return draw.group_index


def dropped_and_not_listed(run: SyntheticAsyncRun, chance: random.Random) -> int:
    """Filtered, acknowledged with the next collection, and forgotten in its list."""
    fill(run, chance, BATCH + 1)
    draw = chance.choice(run.finished)
    run.drop(draw, "stale")
    run.unlisted.pop()
    run.source.assign(run.trained, [draw.group_index])
    return draw.group_index


def written_twice_in_one(run: SyntheticAsyncRun, chance: random.Random) -> int:
    """Two attempts of one prompt finish, and one collection takes both."""
    fill(run, chance)
    draw = chance.choice(run.finished[:BATCH])
    kept, run.finished = run.finished[:BATCH], run.finished[BATCH:]
    listed, run.unlisted = run.unlisted, []
    done = {each.group_index for each in kept} | {each.draw.group_index for each in listed}
    run.source.forget(run.trained)
    run.train(run.commit(run.trained + 1, [*kept, draw], listed, acknowledged=done))
    return draw.group_index


def consumed_twice(run: SyntheticAsyncRun, chance: random.Random) -> int:
    """A stale group is sampled again although an update took it."""
    fill(run, chance)
    draw = chance.choice(run.finished[:BATCH])
    run.train(run.collect(run.trained + 1))
    fill(run, chance)
    kept, run.finished = run.finished[: BATCH - 1], run.finished[BATCH - 1 :]
    run.source.forget(run.trained)
    acknowledged = [each.group_index for each in kept]
    run.train(run.commit(run.trained + 1, [draw, *kept], acknowledged=acknowledged))
    return draw.group_index


def dropped_and_trained(run: SyntheticAsyncRun, chance: random.Random) -> int:
    """Handler "drop" says that it is gone, yet its group stays in the queue."""
    fill(run, chance, BATCH + 1)
    draw = chance.choice(run.finished)
    run.drop(draw, "stale")
    run.train(run.collect(run.trained + 1))
    fill(run, chance)
    kept, run.finished = run.finished[: BATCH - 1], run.finished[BATCH - 1 :]
    run.source.forget(run.trained)
    acknowledged = [each.group_index for each in kept]
    run.train(run.commit(run.trained + 1, [*kept, draw], acknowledged=acknowledged))
    return draw.group_index


def dropped_twice(run: SyntheticAsyncRun, chance: random.Random) -> int:
    """The list of drops is not emptied when a collection has told it."""
    fill(run, chance, BATCH + 1)
    draw = chance.choice(run.finished)
    run.drop(draw, "max_requeues")
    run.train(run.collect(run.trained + 1))
    fill(run, chance)
    kept, run.finished = run.finished[:BATCH], run.finished[BATCH:]
    run.source.forget(run.trained)
    again = DroppedGroup(draw=draw, reason="max_requeues")
    acknowledged = [each.group_index for each in kept]
    run.train(run.commit(run.trained + 1, kept, [again], acknowledged=acknowledged))
    return draw.group_index


def drawn_twice(run: SyntheticAsyncRun, chance: random.Random) -> int:
    """The cursor moves a row back while the numbers go on."""
    run.submit(MOST_OWNED)  # so that there is a row to go back to
    state = run.source.snapshot(run.trained)
    run.forget_groups()
    run.source = run.source_at(state.model_copy(update={"sample_offset": state.sample_offset - 1}))
    run.submit(len(state.pending) + 1)
    return state.sample_group_index


LOSSES: tuple[Plant, ...] = (
    acknowledged_in_the_making,
    acknowledged_and_not_written,
    dropped_and_not_listed,
)
DOUBLES: tuple[Plant, ...] = (
    written_twice_in_one,
    consumed_twice,
    dropped_and_trained,
    dropped_twice,
    drawn_twice,
)


def history_with(plant: Plant, seed: int) -> tuple[Audit, int]:
    """A random past, the fault, and two more updates of a run that goes on as if nothing were."""
    chance = random.Random(seed)
    run = new_run()
    live(run, chance, 8, checked=False)
    fill(run, chance)
    run.train(run.collect(run.trained + 1))
    assert audit(run.store.root).is_clean
    group_index = plant(run, chance)
    for _ in range(2):
        fill(run, chance)
        run.train(run.collect(run.trained + 1))
    if chance.random() < 0.5:
        run.checkpoint()
    return audit(run.store.root), group_index


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("plant", LOSSES, ids=lambda plant: plant.__name__)
def test_every_loss_is_found(plant: Plant, seed: int) -> None:
    books, group_index = history_with(plant, seed)
    lost = [life.group_index for life in books.lives if life.fate is Fate.MISSING]
    assert lost == [group_index], books.notes
    assert (books.prompts_doubled, books.updates_doubled) == (0, 0)
    assert books.verdict == "not accounted for: 1 prompts missing"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("plant", DOUBLES, ids=lambda plant: plant.__name__)
def test_every_double_is_found(plant: Plant, seed: int) -> None:
    books, group_index = history_with(plant, seed)
    doubled = [life.group_index for life in books.lives if life.doubled]
    assert group_index in doubled, books.notes
    assert len(doubled) == (2 if plant is drawn_twice else 1)
    assert (books.prompts_doubled, books.updates_doubled) == (1, 0)
    assert books.count(Fate.MISSING) == 0
    assert not books.is_clean


@pytest.mark.parametrize("seed", range(6))
def test_an_update_applied_twice_is_found(seed: int) -> None:
    chance = random.Random(seed)
    run = new_run()
    live(run, chance, 8, checked=False)
    fill(run, chance)
    run.train(run.collect(run.trained + 1))
    run.row(run.trained, run.epoch, "f" * 64, run.trained + 2)
    run.trained_sha256 = ""
    books = audit(run.store.root)
    assert books.updates_doubled == 1
    assert not books.is_clean


@pytest.mark.parametrize("seed", range(6))
def test_a_ledger_that_owes_what_was_consumed_is_found(seed: int) -> None:
    chance = random.Random(seed)
    run = new_run()
    live(run, chance, 8, checked=False)
    fill(run, chance)
    draw = run.finished[0]
    manifest = run.collect(run.trained + 1)
    owed = (draw, *manifest.data_after.pending)
    after = manifest.data_after.model_copy(update={"pending": owed})
    run.write_manifest(manifest.model_copy(update={"data_after": after}))
    for trained in (False, True):
        if trained:
            run.train(manifest)
        books = audit(run.store.root)
        assert [life.group_index for life in books.lives if life.doubled] == [draw.group_index]
        assert books.prompts_doubled == 1
