"""Sibling times: worked durations on set clocks, outcomes, and what a collection reports."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from activities.rollout.siblings import AttemptClock, consumed_siblings, sibling_summary
from models.errors import ContractViolation, GenerationFault
from models.metrics import refuse_undeclared
from models.sample import SampleGroup
from models.timing import AttemptTimes, SampleTimes


class Clocks:
    """The wall clock stands 1000 s ahead of the monotonic one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rows: list[tuple[str, Mapping[str, Any]]] = []

    def clock(self, group_index: int = 7) -> AttemptClock:
        return AttemptClock(
            group_index,
            lambda rel, row: self.rows.append((rel, row)),
            wall=lambda: 1000.0 + self.now,
            monotonic=lambda: self.now,
        )


def times(*spans: tuple[float, float | None]) -> AttemptTimes:
    return AttemptTimes(
        "a" * 32,
        tuple(
            SampleTimes(index, 1000 + begin, begin, None if end is None else 1000 + end, end)
            for index, (begin, end) in enumerate(spans)
        ),
    )


def group(measured: AttemptTimes | None) -> SampleGroup:
    return SampleGroup(0, "p", 0, [], times=measured)


def test_the_row_of_a_complete_attempt() -> None:
    clocks = Clocks()
    with clocks.clock() as clock:
        with clock.sample(28):
            clocks.now = 2.0
            with clock.sample(29):
                clocks.now = 5.0
        clocks.now = 6.0
        measured = clock.times()
    ((rel, row),) = clocks.rows
    attempt = row["group_attempt"]
    assert rel == f"checkpoints/sibling_timing_{attempt[0]}.jsonl"
    assert len(attempt) == 32
    assert measured.group_attempt == attempt
    expected = {
        "schema_version": 1,
        "group_attempt": attempt,
        "group_index": 7,
        "outcome": "complete",
        "group_finished_unix": 1006.0,
        "group_finished_monotonic": 6.0,
        "samples": [
            {
                "sample_index": 28, "started_unix": 1000.0, "started_monotonic": 0.0,
                "finished_unix": 1005.0, "finished_monotonic": 5.0,
            },
            {
                "sample_index": 29, "started_unix": 1002.0, "started_monotonic": 2.0,
                "finished_unix": 1005.0, "finished_monotonic": 5.0,
            },
        ],
        "summary": {
            "samples": 2, "finished_samples": 2, "group_seconds": 5.0,
            "sample_seconds_mean": 4.0, "sample_seconds_max": 5.0, "retained_seconds": 0.0,
        },
    }  # fmt: skip
    assert row == expected


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (GenerationFault("gone", "transport"), "transport"),
        (asyncio.CancelledError(), "canceled"),
        (ContractViolation("garbage"), "failed"),
    ],
)
def test_an_attempt_that_fails_leaves_a_row_and_its_error(
    error: BaseException, outcome: str
) -> None:
    clocks = Clocks()

    def fail() -> None:
        with clocks.clock() as clock:
            with clock.sample(0):
                clocks.now = 1.0
            with clock.sample(1):
                raise error

    with pytest.raises(type(error)):
        fail()
    ((_, row),) = clocks.rows
    assert row["outcome"] == outcome
    assert row["samples"][0]["finished_monotonic"] == 1.0
    assert row["samples"][1]["finished_monotonic"] is None
    assert row["summary"]["finished_samples"] == 1


def test_two_attempts_of_a_group_have_different_names() -> None:
    clocks = Clocks()
    for _ in range(2):
        with clocks.clock():
            pass
    first, second = (row["group_attempt"] for _, row in clocks.rows)
    assert first != second


def test_finished_samples_wait_for_the_slowest() -> None:
    # ends at 2, 3, 6 and begins at 0, 1, 0: waits 4 + 3 + 0, durations 2 + 2 + 6
    summary = sibling_summary(times((0, 2), (1, 3), (0, 6)))
    assert summary == {
        "samples": 3, "finished_samples": 3, "group_seconds": 6.0,
        "sample_seconds_mean": pytest.approx(10 / 3), "sample_seconds_max": 6.0,
        "retained_seconds": 7.0,
    }  # fmt: skip


def test_an_attempt_without_a_finished_sample_has_no_durations() -> None:
    assert sibling_summary(times((0, None))) == {"samples": 1, "finished_samples": 0}


def test_a_collection_reports_its_own_groups_only() -> None:
    metrics = consumed_siblings(
        [group(times((0, 2), (1, 3), (0, 6))), group(times((0, 4), (0, 4))), group(None)]
    )
    refuse_undeclared(metrics)
    assert metrics == pytest.approx(
        {
            "rollout/siblings/consumed/groups": 2,
            "rollout/siblings/consumed/group_seconds_mean": 5.0,
            "rollout/siblings/consumed/group_seconds_max": 6.0,
            "rollout/siblings/consumed/sample_seconds_max": 6.0,
            "rollout/siblings/consumed/retained_seconds_mean": 3.5,
            # waiting 7 of 10 + 8 seconds of sampling and 7 of waiting
            "rollout/siblings/consumed/retained_fraction": 7 / 25,
        }
    )


def test_without_measurements_nothing_is_reported() -> None:
    assert consumed_siblings([group(None), group(times((0, None)))]) == {}
