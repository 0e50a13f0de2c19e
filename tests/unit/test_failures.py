"""The error tree at Temporal's boundary."""

import asyncio
import errno
import pickle

import pytest
from temporalio.api.failure.v1 import Failure as FailureProto
from temporalio.converter import DefaultFailureConverter, DefaultPayloadConverter
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    RetryState,
    TimeoutError,
    TimeoutType,
)

from activities.failures import (
    DEFECT_ATTEMPTS,
    from_application_error,
    to_application_error,
    translated,
)
from models.errors import PerdureError, StorageFull, all_errors
from models.run import LoopPlan
from workflows.options import PUBLISH, STAGES, publish_stage
from workflows.recovery import classify


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_each_error_survives_the_way_through_temporal(kind: type[PerdureError]) -> None:
    failure = FailureProto()
    converter, payloads = DefaultFailureConverter(), DefaultPayloadConverter()
    converter.to_failure(to_application_error(kind("what, where, what to do")), payloads, failure)
    arrived = converter.from_failure(failure, payloads)
    assert isinstance(arrived, ApplicationError)
    assert arrived.type == kind.__name__
    assert arrived.non_retryable is not kind.retryable
    back = from_application_error(arrived)
    assert type(back) is kind
    assert back.message == "what, where, what to do"
    assert str(pickle.loads(pickle.dumps(back))) == str(back)


def test_a_foreign_failure_is_not_invented() -> None:
    assert from_application_error(ApplicationError("x", type="KeyError")) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_device_is_storage_full(number: int) -> None:
    with pytest.raises(ApplicationError) as error, translated(1):
        raise OSError(number, "No space left on device", "/data/x")
    assert error.value.type == StorageFull.type_name()
    assert error.value.non_retryable
    assert "/data/x" in error.value.message


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(FileNotFoundError), translated(1):
        raise FileNotFoundError(errno.ENOENT, "no such file", "/x")
    with pytest.raises(asyncio.CancelledError), translated(9):
        raise asyncio.CancelledError


def test_a_defect_is_not_retried_for_ever() -> None:
    with pytest.raises(KeyError), translated(DEFECT_ATTEMPTS - 1):
        raise KeyError("colour")
    with pytest.raises(ApplicationError) as error, translated(DEFECT_ATTEMPTS):
        raise KeyError("colour")
    assert error.value.non_retryable
    assert error.value.type == "KeyError"
    assert "colour" in error.value.message


def activity_error(cause: BaseException) -> ActivityError:
    error = ActivityError(
        "Activity task failed", scheduled_event_id=1, started_event_id=2, identity="w",
        activity_type="optimize", activity_id="1", retry_state=RetryState.MAXIMUM_ATTEMPTS_REACHED,
    )  # fmt: skip
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("kind", "recoverable"),
    [
        ("TrainerLost", True), ("ProducerLost", True), ("EngineLost", True), ("ActorLost", True),
        ("StaleFence", True),
        ("OwnershipError", False), ("ConfigurationError", False), ("NonFiniteLoss", False),
        ("StorageFull", False), ("DigestMismatch", False), ("ServingFailureSustained", False),
        ("ServiceUnreachable", False), ("KeyError", False),
    ],
)  # fmt: skip
def test_what_a_rebuild_can_repair(kind: str, recoverable: bool) -> None:
    failure = classify(activity_error(ApplicationError("gone", type=kind)))
    assert failure.recoverable is recoverable
    assert str(failure) == f"{kind}: gone"


def test_exhausted_heartbeats_are_answered_by_a_rebuild() -> None:
    timeout = TimeoutError("x", type=TimeoutType.HEARTBEAT, last_heartbeat_details=[])
    failure = classify(activity_error(timeout))
    assert failure.recoverable
    assert "optimize: heartbeat" in failure.message


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_is_bounded(stage: object) -> None:
    config = stage.config(None, "label")  # type: ignore[attr-defined]
    assert 0 < config["retry_policy"].maximum_attempts <= 30
    assert config["heartbeat_timeout"].total_seconds() == 4.0
    assert "PayloadsTooLarge" in config["retry_policy"].non_retryable_error_types
    assert "StaleFence" in config["retry_policy"].non_retryable_error_types
    assert "ServiceUnreachable" not in config["retry_policy"].non_retryable_error_types


def test_the_multiplier_scales_work_and_not_heartbeats() -> None:
    plan = LoopPlan(num_rollouts=1, infra_timeout_multiplier=5.0, heartbeat_timeout_s=7.0)
    config = PUBLISH.config(plan, "")
    assert config["start_to_close_timeout"].total_seconds() == 5 * 600
    assert config["schedule_to_close_timeout"].total_seconds() == 5 * 1800
    assert config["heartbeat_timeout"].total_seconds() == 7.0


def test_a_rolling_publication_has_time_for_every_engine() -> None:
    assert publish_stage(LoopPlan(num_rollouts=1)) is PUBLISH
    assert publish_stage(LoopPlan(num_rollouts=1, publish_timeout_s=60.0)) is PUBLISH
    # Eight engines of the default deadlines: 300 + 8 x (180 + 180).
    slow = publish_stage(LoopPlan(num_rollouts=1, publish_timeout_s=3180.0))
    assert (slow.start_to_close_s, slow.schedule_to_close_s) == (3180.0, 9540.0)
