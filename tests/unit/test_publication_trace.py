"""Times of a publication, and the diagnostics that are off unless asked for."""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from activities import publication_trace
from activities.publication_trace import NAMES, PublicationTrace, diagnostics_wanted
from models.errors import ConfigurationError
from models.ids import RunRef
from workers.actors.order import ActorOrder
from workers.actors.trainer import TrainerActor


@pytest.mark.parametrize(
    ("launch_env", "environment", "wanted"),
    [
        ({}, {}, False),
        ({NAMES[0]: "1"}, {}, True),
        ({}, {NAMES[1]: "1"}, True),
        ({NAMES[0]: "1"}, {NAMES[1]: "1"}, True),
        ({NAMES[0]: "0"}, {}, False),
        ({}, {NAMES[0]: ""}, False),
    ],
)
def test_either_name_in_either_place(
    launch_env: dict[str, str], environment: dict[str, str], wanted: bool
) -> None:
    assert diagnostics_wanted(launch_env, environment) is wanted


@pytest.mark.parametrize(
    "environment", [{NAMES[0]: "1", NAMES[1]: "0"}, {NAMES[0]: "yes"}, {NAMES[1]: "2"}]
)
def test_a_contradiction_and_an_unknown_value_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="PERDURE_PUBLICATION_DIAGNOSTICS"):
        diagnostics_wanted({}, environment)


def test_a_quiet_trace_counts_and_says_nothing() -> None:
    trace = PublicationTrace(4)
    with capture_logs() as logs, trace.watched(0.001):
        for _ in range(2):
            with trace.part("load"):
                time.sleep(0.01)
    assert logs == []
    assert 0.02 <= trace.seconds["load"] <= trace.total_seconds
    assert "publication-watchdog" not in {thread.name for thread in threading.enumerate()}


async def test_a_verbose_trace_tells_steps_and_the_stacks_of_a_blocked_loop() -> None:
    trace = PublicationTrace(4, verbose=True)
    with capture_logs() as logs:
        with trace.watched(0.02):
            with trace.step("engine_load", engine="engine-0"):
                await asyncio.sleep(0)
            with pytest.raises(ValueError, match="no"), trace.part("verify"):
                raise ValueError("no")
            time.sleep(0.2)  # noqa: ASYNC251  the loop is blocked on purpose
        told = len(logs)
        time.sleep(0.05)  # noqa: ASYNC251
    assert len(logs) == told, "the watchdog went on"
    events = [entry["event"] for entry in logs]
    steps = [event for event in events if event != "publication_stacks"]
    assert steps == ["update_start", "engine_load_start", "engine_load_complete", "verify_start",
                     "verify_error", "update_complete"]  # fmt: skip
    assert trace.seconds["verify"] > 0
    stacks = next(entry["stacks"] for entry in logs if entry["event"] == "publication_stacks")
    assert "thread MainThread" in stacks
    assert "time.sleep(0.2)" in stacks


def test_the_trainer_tells_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_trace, "STACKS_EVERY_S", 0.02)

    class Guarded:
        def export_weights(self, *_: object) -> str:
            time.sleep(0.2)
            return "exported"

    actor = TrainerActor.__new__(TrainerActor)
    run = RunRef(run_id="train/x", root=str(tmp_path), spec_sha256="s")
    actor._order = ActorOrder(run=run, role="trainer", scratch=str(tmp_path))
    actor._guarded = Guarded()  # type: ignore[assignment]
    for wish, told in (("0", False), ("1", True)):
        env = {"PERDURE_PUBLICATION_DIAGNOSTICS": wish}
        actor._spec = SimpleNamespace(launch=SimpleNamespace(env=env))  # type: ignore[assignment]
        with capture_logs() as logs:
            assert actor.export_weights(None, 4) == "exported"  # type: ignore[arg-type,comparison-overlap]
        events = {entry["event"] for entry in logs}
        assert ("trainer_export_start" in events) is told
        assert any("export_weights" in str(entry.get("stacks")) for entry in logs) is told
