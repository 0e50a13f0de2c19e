"""Rows of ``rollout_flow.jsonl``."""

from pathlib import Path

from activities.rollout.flow import append_flow, flow_row
from activities.storage.layout import ROLLOUT_FLOW
from activities.storage.store import Store
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from models.timing import AttemptTimes


def sample(index: int, *spans: tuple[int, int, int]) -> Sample:
    length = spans[-1][2]
    return Sample(
        sample_index=index,
        group_index=index // 2,
        prompt_token_ids=[1, 2],
        response_token_ids=[3] * length,
        logprobs=[-1.0] * length,
        spans=[TokenSpan(*span) for span in spans],
        finish_reason=FinishReason.STOP,
    )


GROUPS = [
    SampleGroup(
        0, "a", 0, [sample(0, (5, 0, 4), (7, 4, 10)), sample(1, (7, 0, 3))],
        times=AttemptTimes("ab" * 16, ()),
    ),
    SampleGroup(1, "b", 0, [sample(2, (5, 0, 1), (6, 1, 2), (7, 2, 6)), sample(3, (6, 0, 5))]),
]  # fmt: skip


def test_a_row_describes_what_the_trainer_gets() -> None:
    row = flow_row(
        3, GROUPS, wait_seconds=0.5, queue_metrics={"rollout/fully_async/queue_size": 2.0}
    )
    assert row == {
        "rollout_id": 3,
        "samples": 4,
        "response_tokens": 24,
        "response_lengths": [10, 3, 6, 5],
        "collection_wait_seconds": 0.5,
        "mixed_responses": 2,
        "queue_metrics": {"rollout/fully_async/queue_size": 2.0},
        "sibling_group_attempts": ["ab" * 16],
    }


def test_of_a_repeated_row_the_last_one_is_read(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for seconds in (1.0, 2.0):
        append_flow(store, flow_row(0, GROUPS, wait_seconds=seconds, queue_metrics={}))
    rows = store.read_jsonl(ROLLOUT_FLOW).rows
    assert [row["collection_wait_seconds"] for row in rows] == [1.0, 2.0]
    assert {row["rollout_id"] for row in rows} == {0}
