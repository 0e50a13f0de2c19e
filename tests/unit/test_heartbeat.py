"""The long-call helper: beats, progress, stall, cancellation."""

import asyncio
import dataclasses
from datetime import timedelta
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.heartbeat import beating
from models.errors import NonFiniteLoss, TrainerLost
from models.ports import StageProgress


def environment(heartbeat_s: float = 0.2) -> tuple[ActivityEnvironment, list[Any]]:
    """An activity whose heartbeat details are collected."""
    beats: list[Any] = []
    made = ActivityEnvironment()
    made.info = dataclasses.replace(made.info, heartbeat_timeout=timedelta(seconds=heartbeat_s))
    made.on_heartbeat = lambda *details: beats.append(details[0])
    return made, beats


async def test_beats_carry_progress_while_the_call_runs() -> None:
    activity, beats = environment()
    release = asyncio.Event()
    asked = 0

    async def work() -> str:
        await release.wait()
        return "done"

    async def progress() -> StageProgress:
        nonlocal asked
        asked += 1
        if asked == 3:
            release.set()
        return StageProgress(stage="optimize", done=asked, total=3)

    assert await activity.run(beating, work(), "optimize 4", progress) == "done"
    assert beats[0] == StageProgress(stage="optimize 4")
    assert [beat.done for beat in beats[1:3]] == [1, 2]


async def test_beats_go_on_when_progress_cannot_be_answered() -> None:
    activity, beats = environment()

    async def work() -> int:
        async with asyncio.timeout(5):
            while len(beats) < 4:
                await asyncio.sleep(0.01)
        return 7

    async def silent() -> StageProgress:
        await asyncio.Event().wait()
        raise AssertionError

    async def lost() -> StageProgress:
        raise TrainerLost("gone")

    assert await activity.run(beating, work(), "x", silent) == 7
    beats.clear()
    assert await activity.run(beating, work(), "x", lost) == 7


async def test_the_error_of_the_call_comes_out_unchanged() -> None:
    activity, _ = environment()

    async def work() -> None:
        raise NonFiniteLoss("NaN")

    with pytest.raises(NonFiniteLoss, match="NaN"):
        await activity.run(beating, work(), "x")


async def test_a_stall_is_noticed_and_the_call_ended() -> None:
    activity, _ = environment(heartbeat_s=0.04)
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def stuck() -> StageProgress:
        return StageProgress(stage="forward", done=3, total=8)

    async def body() -> None:
        await beating(work(), "optimize 1", stuck, stall_s=0.1, stalled=TrainerLost)

    with pytest.raises(TrainerLost, match="no progress for 0 s at forward 3 of 8"):
        await asyncio.wait_for(activity.run(body), 5)
    assert ended.is_set()


async def test_a_process_that_answers_nothing_is_given_up_long_before_a_stall() -> None:
    activity, beats = environment(heartbeat_s=0.04)
    ended = asyncio.Event()
    asked = 0

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def silent() -> StageProgress:
        nonlocal asked
        asked += 1
        if asked <= 2:
            return StageProgress(stage="forward", done=asked, total=8)
        await asyncio.Event().wait()
        raise AssertionError

    async def body() -> None:
        await beating(work(), "optimize 1", silent, silent_s=0.3, stalled=TrainerLost)

    with pytest.raises(TrainerLost, match="has not answered for 0 s, last heard of at forward 2"):
        await asyncio.wait_for(activity.run(body), 5)
    assert ended.is_set()
    assert asked == 3, "one question at a time"
    assert beats[-1].done == 2 or beats[-1].detail == "ending"


@pytest.mark.parametrize("slow_s", [0.1, 0.0])
async def test_slow_answers_and_errors_of_a_lost_actor_are_no_silence(slow_s: float) -> None:
    activity, _ = environment(heartbeat_s=0.04)
    asked = 0

    async def work() -> str:
        async with asyncio.timeout(5):
            while asked < 8:
                await asyncio.sleep(0.01)
        return "done"

    async def progress() -> StageProgress:
        nonlocal asked
        asked += 1
        if not slow_s:
            raise TrainerLost("gone: the call ends with it")
        await asyncio.sleep(slow_s)  # longer than a beat
        return StageProgress(stage="forward")

    async def body() -> str:
        return await beating(work(), "x", progress, silent_s=0.5, stalled=TrainerLost)

    assert await activity.run(body) == "done"


async def test_cancellation_ends_the_call_before_the_activity() -> None:
    activity, _ = environment()
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.set()

    running = asyncio.create_task(activity.run(beating, work(), "x"))
    await asyncio.wait_for(started.wait(), 5)
    activity.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 5)
    assert ended.is_set()


async def test_a_cancelled_call_is_joined_under_heartbeats() -> None:
    """Else the server takes the activity for dead while its work still ends."""
    activity, beats = environment(heartbeat_s=0.1)
    began = asyncio.Event()
    ended = False

    async def work() -> None:
        nonlocal ended
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            before = len(beats)
            async with asyncio.timeout(5):
                while len(beats) < before + 3:
                    await asyncio.sleep(0.01)
            ended = True

    running = asyncio.create_task(activity.run(beating, work(), "collect 3"))
    await asyncio.wait_for(began.wait(), 5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended
    assert beats[-1] == StageProgress(stage="collect 3", detail="ending")
