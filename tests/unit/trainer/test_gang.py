"""Which of several ends of ranks is the one that the others followed."""

import threading

import pytest

from models.ids import RunRef
from workers.trainers.gang import Gang, RankOrder


@pytest.fixture
def told() -> list[tuple[int, str]]:
    return []


@pytest.fixture
def gang(told) -> Gang:
    run = RunRef(run_id="train/gang", root="/nowhere", spec_sha256="0" * 64)
    order = RankOrder(run=run, rank=0, world=3, rendezvous="/nowhere/file", timeout_s=1.0)
    return Gang(order, lambda rank, reason: told.append((rank, reason)))


def test_a_killed_rank_is_named_though_one_that_missed_it_was_seen_to_end_first(gang, told):
    follower = threading.Thread(target=gang._ended, args=(2, "ended with 1", False))
    follower.start()
    gang._ended(1, "was ended by SIGKILL", True)
    follower.join(10)
    assert told == [(1, "rank 1 of 3 of the trainer was ended by SIGKILL")]
    assert not gang.alive


def test_a_rank_that_ends_with_an_error_of_its_own_is_named(gang, told):
    gang._ended(2, "ended with 1", False)
    assert told == [(2, "rank 2 of 3 of the trainer ended with 1")]


def test_ranks_that_were_dismissed_are_no_loss(gang, told):
    gang.close()
    gang._ended(1, "was ended by SIGKILL", True)
    assert told == []
