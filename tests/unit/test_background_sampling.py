"""Evaluating a snapshot: N rows in, N rows out, results once, other inputs refused."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.background import evaluate_snapshot as evaluating
from activities.background.receipts import COMPLETE, encoded, read_receipt
from activities.background.sampling import HeldOutSampling
from activities.storage import layout
from activities.storage.store import Store
from activities.verifiers.registry import build_verifiers
from configs.load import resolve_document
from configs.plan import loop_plan
from models.background import (
    BackgroundOrder,
    EvaluationFailure,
    EvaluationReceipt,
    SnapshotRef,
)
from models.errors import (
    ConfigurationError,
    ContractViolation,
    EngineLost,
    ServiceUnreachable,
)
from models.evaluation import EvaluateRequest, ReceiptStatus
from models.ids import FenceToken, RunRef
from tests.support.fake_engines import Script
from tests.support.fake_evaluator import FakeEvaluator, FakeEvaluators
from tests.support.fake_fleet import FakeFleet, ListTracker, site_of

EOS, VOCAB_SIZE = 0, 256


def sampling_of(rig: Any, held_out: int = 5, **evaluation: Any) -> HeldOutSampling:
    spec = rig.spec(evaluation={"samples_per_prompt": 2, **evaluation})
    return HeldOutSampling(
        spec,
        rig.prompts(held_out, "eval"),
        build_verifiers(),
        lambda ids: "".join(map(chr, ids)),
        (EOS,),
        VOCAB_SIZE,
        connect=rig.connect,
    )


async def test_rows_come_back_as_the_run_itself_would_sample_them(rig: Any) -> None:
    sampling = sampling_of(rig)
    async with asyncio.timeout(20):
        groups = await sampling.run("http://one", 0)
    await sampling.aclose()
    assert [group.prepared_sample_id for group in groups] == [f"task:eval:{i}" for i in range(5)]
    assert (sampling.samples_done, sampling.samples_total) == (10, 10)
    seeds = [
        (tuple(body["input_ids"]), body["sampling_params"]["sampling_seed"])
        for body in rig.engine.bodies
    ]
    rig.engine.bodies.clear()
    spec = rig.spec(evaluation={"samples_per_prompt": 2})
    producer = rig.producer(spec, held_out=5)
    token = FenceToken(epoch=1, update=0, attempt=1)
    await producer.set_engines(token, ("http://one",))
    request = EvaluateRequest(run=rig.run, epoch=1, update=0, policy_version=0, phase="initial")
    await producer.evaluate(token, request)
    assert sorted(seeds) == sorted(
        (tuple(body["input_ids"]), body["sampling_params"]["sampling_seed"])
        for body in rig.engine.bodies
    )


async def test_a_lost_connection_costs_its_row_another_attempt(rig: Any) -> None:
    rig.engine.next_scripts.append(rig.engine.dropping())
    sampling = sampling_of(rig)
    async with asyncio.timeout(20):
        groups = await sampling.run("http://one", 0)
    await sampling.aclose()
    assert [len(group.samples) for group in groups] == [2] * 5


async def test_samples_of_another_version_are_refused(rig: Any) -> None:
    sampling = sampling_of(rig)
    with pytest.raises(ContractViolation, match="weight_version"):
        await sampling.run("http://one", 7)
    await sampling.aclose()


def test_nothing_to_evaluate_is_a_mistake_in_the_run_file(rig: Any) -> None:
    with pytest.raises(ConfigurationError, match="eval_count"):
        sampling_of(rig, held_out=0)


class Desk:
    """A receipt that was submitted, its snapshot, and the activity on fakes."""

    def __init__(self, root: Any) -> None:
        self.store = Store(root)
        document = {
            "schema_version": 1,
            "name": "desk",
            "model": {"source": "tiny", "tiny": {}},
            "data": {"tasks": [{"task": "reverse_word", "train_count": 8, "eval_count": 2}]},
            "output": {"root": str(root)},
            "training": {"num_rollouts": 6},
            "evaluation": {"mode": "background", "interval": 2},
        }
        loaded = resolve_document(document, origin="test")
        self.store.write_json(layout.RESOLVED_CONFIG, loaded.document)
        self.store.write_bytes(layout.EVAL_JSONL, b"{}\n")
        self.order = BackgroundOrder(
            run=RunRef(run_id="train/desk", root=str(root), spec_sha256=loaded.sha256),
            receipt=layout.eval_receipt(2, "a" * 16),
            experiment_id="train/desk/evaluation/2",
            phase="periodic",
            snapshot=SnapshotRef(
                update=2,
                policy_version=2,
                folder=layout.eval_snapshot(2),
                digest="d" * 64,
                num_bytes=1,
            ),
            timeout_s=10.0,
            plan=loop_plan(loaded.spec),
        )
        pending = EvaluationReceipt(update=2, status=ReceiptStatus.PENDING)
        self.store.write_bytes(self.order.receipt, encoded(pending))
        self.store.write_bytes(f"{layout.eval_snapshot(2)}/.complete", b"")
        self.script, self.tracker = Script(), ListTracker()
        self.evaluators = FakeEvaluators(self.script)

    async def evaluate(self, **snapshot: Any) -> Any:
        order = self.order.model_copy(
            update={"snapshot": self.order.snapshot.model_copy(update=snapshot)}
        )
        return await ActivityEnvironment().run(
            evaluating.evaluate_snapshot,
            site_of(FakeFleet(), self.tracker),
            self.evaluators.open,
            order,
        )

    @property
    def receipt(self) -> EvaluationReceipt:
        return read_receipt(self.store, self.order.receipt)


@pytest.fixture
def desk(tmp_path: Any) -> Desk:
    return Desk(tmp_path)


async def test_an_attempt_whose_answer_was_lost_is_answered_from_its_results(desk: Desk) -> None:
    first = await desk.evaluate()
    assert await desk.evaluate() == first
    assert desk.script.log == ["evaluate_snapshot 2"]
    assert len(desk.tracker.rows) == 1
    assert len(desk.store.read_jsonl(layout.METRICS).rows) == 1
    assert desk.receipt.result is not None
    assert desk.receipt.result["status"] == COMPLETE


async def test_an_attempt_that_died_before_it_told_anybody_tells_again(desk: Desk) -> None:
    await desk.evaluate()
    folder = layout.eval_results(desk.order.receipt)
    desk.store.write_json(f"{folder}/{layout.EVAL_PUBLICATION}", {"status": "deferred"})
    await desk.evaluate()
    assert len(desk.tracker.rows) == 2
    assert desk.script.log == ["evaluate_snapshot 2"]


async def test_results_of_other_inputs_are_not_reused(desk: Desk) -> None:
    await desk.evaluate()
    with pytest.raises(ContractViolation, match=r"other inputs \(.*snapshot_digest"):
        await desk.evaluate(digest="e" * 64)
    desk.store.write_bytes(layout.EVAL_JSONL, b"{}\n{}\n")
    with pytest.raises(ContractViolation, match="eval_sha256"):
        await desk.evaluate()


async def test_a_lost_engine_may_be_tried_again_and_a_missing_snapshot_not(desk: Desk) -> None:
    desk.script.fail("evaluate_snapshot 2", EngineLost("killed"))
    with pytest.raises(ServiceUnreachable, match="killed"):
        await desk.evaluate()
    assert desk.receipt.status is ReceiptStatus.SUBMITTED
    assert desk.evaluators.num_open == 0
    desk.store.remove_tree(f"{layout.eval_snapshot(2)}/.complete")
    with pytest.raises(ConfigurationError, match="not a complete snapshot"):
        await desk.evaluate()


async def test_an_evaluator_that_does_not_start_may_be_tried_again(desk: Desk) -> None:
    @asynccontextmanager
    async def refuse(order: BackgroundOrder) -> AsyncIterator[FakeEvaluator]:
        raise EngineLost("no place")
        yield

    desk.evaluators.open = refuse  # type: ignore[method-assign]
    with pytest.raises(ServiceUnreachable, match="no place"):
        await desk.evaluate()


async def test_a_late_failure_does_not_replace_a_result(desk: Desk) -> None:
    """A worker taken for dead may finish after the last attempt was given up."""
    await desk.evaluate()
    before = desk.receipt
    failure = EvaluationFailure(order=desk.order, error_type="StageTimeout", error="late")
    await evaluating.record_evaluation(failure)
    assert desk.receipt == before


async def test_a_slow_start_of_the_evaluator_is_covered_by_heartbeats(desk: Desk) -> None:
    ready = asyncio.Event()
    open_at_once = desk.evaluators.open

    @asynccontextmanager
    async def slow(order: BackgroundOrder) -> AsyncIterator[FakeEvaluator]:
        async with asyncio.timeout(10):
            await ready.wait()
        async with open_at_once(order) as evaluator:
            yield evaluator

    desk.evaluators.open = slow  # type: ignore[method-assign]
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(
        environment.info, heartbeat_timeout=timedelta(seconds=0.1)
    )
    beats: list[Any] = []

    def beat(*details: Any) -> None:
        beats.append(details)
        if len(beats) == 3:
            ready.set()

    environment.on_heartbeat = beat
    await environment.run(
        evaluating.evaluate_snapshot,
        site_of(FakeFleet(), desk.tracker),
        desk.evaluators.open,
        desk.order,
    )
    assert len(beats) >= 3
