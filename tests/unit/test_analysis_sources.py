"""The tools that measure runs read what the writers of a run write."""

from pathlib import Path

import pytest
from measured_run import MeasuredRun, step_event
from synthetic_run import SyntheticRun

from activities.analysis import capacity, occupancy, throughput
from activities.analysis.observations import PIPELINE_SERIES
from activities.rollout.flow import flow_row
from activities.rollout.occupancy import Held, Occupancy
from activities.rollout.queue_metrics import QueueMetrics
from activities.storage import layout
from models.errors import ContractViolation
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan


def group(*lengths: int) -> SampleGroup:
    samples = [
        Sample(
            sample_index=index,
            group_index=0,
            prompt_token_ids=[1],
            response_token_ids=[2] * length,
            logprobs=[-1.0] * length,
            spans=[TokenSpan(0, 0, length)],
            finish_reason=FinishReason.STOP,
        )
        for index, length in enumerate(lengths)
    ]
    return SampleGroup(group_index=0, prepared_sample_id="p", epoch_id=0, samples=samples)


def test_rows_of_the_queue(tmp_path: Path) -> None:
    """70 tokens are delivered and 30 dropped in the one measured update."""
    run = MeasuredRun(tmp_path, updates=2)
    metrics = QueueMetrics()
    kept = group(30, 40)
    metrics.delivered(kept, 1)
    metrics.dropped(group(10, 20), 5)
    metrics.stale()
    metrics.waited(0.125)
    run.flow[1] = flow_row(1, [kept], wait_seconds=0.5, queue_metrics=metrics.collect(0, ()))
    root = run.write()
    report = throughput.analyze(root, warmup=1)
    assert report["useful_response_tokens"] == 70
    assert report["discarded_token_fraction"] == pytest.approx(0.3)
    assert report["batch_collection_breakdown"]["completed_queue_get_seconds"] == 0.125
    row = capacity.measurements(root, warmup=1)["rows"][1]
    assert row["quality/stale_groups_filtered"] == 1
    assert row["quality/completed_queue/dropped_samples"] == 2
    assert row["quality/avg_staleness"] == 1


def test_rows_of_the_pipeline(tmp_path: Path) -> None:
    run = MeasuredRun(tmp_path)
    root = run.write()
    snapshot = Occupancy(
        completed_queue=Held(groups=4, samples=16, response_tokens=160),
        producer_ready=Held(groups=1, samples=4, response_tokens=40),
        shutdown_unqueued=None,
        completed_put_wait_seconds=2.0,
        completed_put_current_wait_seconds=0.5,
        producer_owned_groups=3,
        producer_active_group_tasks=2,
        producer_admission_open=True,
        producer_unfinished_samples=9,
        completed_queue_groups=4,
        completed_queue_capacity_groups=4,
        generation_admission_paused=False,
        generation_admission_waiters=1,
        generation_active_calls=5,
        http_capacity_requests=8,
        http_active_requests=7,
        http_waiting_requests=6,
        errors={},
    )
    run.append(layout.PIPELINE_OCCUPANCY, [{"time_unix": 3.0, **snapshot.row()}])
    pipeline = occupancy.analyze(root, warmup=1)["pipeline"]
    assert {name: summary["mean"] for name, summary in pipeline.items()} == {
        "producer_owned_groups": 3,
        "producer_active_group_tasks": 2,
        "producer_admission_open": 1,
        "producer_unfinished_samples": 9,
        "completed_queue_groups": 4,
        "completed_queue_capacity_groups": 4,
        "generation_admission_paused": 0,
        "generation_admission_waiters": 1,
        "generation_active_calls": 5,
        "http_capacity_requests": 8,
        "http_active_requests": 7,
        "http_waiting_requests": 6,
        "completed_queue_response_tokens": 160,
        "producer_ready_groups": 1,
        "producer_ready_response_tokens": 40,
        "completed_queue_full": 1,
        "completed_put_blocked": 1,
    }
    assert set(pipeline) == set(PIPELINE_SERIES)


@pytest.fixture
def sequential(tmp_path: Path) -> SyntheticRun:
    """Four updates of eight samples and eight response tokens; update 3 is done twice."""
    run = SyntheticRun(str(tmp_path / "root"))
    run.updates(0, 2)
    run.checkpoint()
    run.updates(3, 3)
    return run


def finish(run: SyntheticRun) -> str:
    """What a workflow adds: plan, end, stages and steps, under the same root."""
    made = MeasuredRun(Path(run.store.root), updates=4)
    made.plan["runtime"]["shape"]["fully_async"] = False
    made.flow, made.lines = [], []
    if run.epoch > 1:  # the update that a rebuild undid left its rows
        made.contract[0].append(step_event(4, 3, 0, seconds=0.25))
    return made.write()


def test_sequential_runs_tell_tokens_and_know_no_queue(sequential: SyntheticRun) -> None:
    report = throughput.analyze(finish(sequential), warmup=1)
    assert report["useful_response_tokens"] == 24
    assert [row["samples"] for row in report["per_update"]] == [8, 8, 8]
    unknown = (
        "discarded_response_tokens",
        "discarded_token_fraction",
        "batch_collection_breakdown",
        "mixed_responses",
        "terminal_unused_work",
    )
    assert {report[name] for name in unknown} == {None}


def test_a_rebuilt_run_is_refused_or_measured_by_its_last_tries(sequential: SyntheticRun) -> None:
    sequential.lose_trainer()
    sequential.updates(3, 3)
    root = finish(sequential)
    with pytest.raises(ContractViolation, match="1 updates were undone by a rebuild"):
        throughput.analyze(root, warmup=1)
    report = throughput.analyze(root, warmup=1, allow_incomplete=True)
    assert report["redone_updates"] == 1
    assert report["completed_updates"] == 4
    assert [row["step_seconds"] for row in report["per_update"]] == [0.5, 0.5, 0.25]
