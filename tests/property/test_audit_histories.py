"""Whatever dies in whatever order, the books of a correct run are clean at every moment."""

import random
import uuid

import pytest
from synthetic_run import SyntheticRun

from activities.analysis.audit import audit


@pytest.mark.parametrize("seed", range(25))
def test_whatever_dies_when_a_correct_run_is_clean(seed):
    """Random histories of sequential and overlapped updates, drops, checkpoints and losses."""
    chance = random.Random(seed)
    run = SyntheticRun(f"memory://{uuid.uuid4().hex}/root", num_prompts=7, batch=2)
    ahead = None
    for _ in range(14):
        update = run.trained + 1
        event = chance.choice((*["update"] * 4, "checkpoint", "trainer", "producer", "worker"))
        if event == "update":
            manifest = ahead or run.collect(update, chance.randrange(3))
            ahead = run.collect(update + 1, chance.randrange(2)) if chance.random() < 0.5 else None
            run.train(manifest)
        elif event == "checkpoint" and update > 0:
            run.checkpoint()
        elif event == "trainer":
            ahead = None
            if chance.random() < 0.5:
                run.collect(update)
            run.lose_trainer()
        elif event == "producer":
            if chance.random() < 0.5:
                manifest = ahead or run.collect(update, 1)
                run.train(manifest, recorded=False)
            ahead = None
            run.lose_producer()
        elif event == "worker":  # trainer and producer live on
            ahead = None
            run.claim()
        books = audit(run.store.root)
        assert books.is_clean, (event, books.verdict, books.notes)
