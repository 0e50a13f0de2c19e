"""The loop watch of worker processes, connecting to nothing, and the sandbox's import rule."""

import asyncio
import socket
import subprocess
import sys
import threading
import time

import pytest

from models.errors import ServiceUnreachable
from workers.connection import connect
from workers.serving import watch_loop


async def test_a_blocked_loop_is_noticed() -> None:
    blocked = threading.Event()
    watch_loop(asyncio.get_running_loop(), period_s=0.01, misses=3, on_blocked=blocked.set)
    time.sleep(0.3)  # noqa: ASYNC251 - blocking the loop is the point
    assert blocked.is_set()


def test_a_free_loop_is_left_alone() -> None:
    blocked = threading.Event()

    async def body() -> threading.Thread:
        thread = watch_loop(
            asyncio.get_running_loop(), period_s=0.02, misses=5, on_blocked=blocked.set
        )
        for _ in range(20):
            await asyncio.sleep(0.01)
        return thread

    thread = asyncio.run(body())
    thread.join(timeout=5)
    assert not thread.is_alive(), "the watch ends with its loop"
    assert not blocked.is_set()


async def test_no_server_is_said_within_seconds() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(ServiceUnreachable, match=f"127.0.0.1:{port}"):
        await connect(f"127.0.0.1:{port}", timeout_s=2.0)
    assert time.monotonic() - started < 5


async def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServiceUnreachable):
            await asyncio.wait_for(connect(address, timeout_s=0.5), 5)


HANGING = """
import asyncio, time
from models.errors import ServiceUnreachable
from workers.serving import run_process

async def body():
    asyncio.ensure_future(asyncio.to_thread(time.sleep, 300))
    await asyncio.sleep(0.1)
    raise {error}

run_process(body())
"""


@pytest.mark.parametrize(
    ("error", "code"), [("ServiceUnreachable('no Ray')", 3), ("TimeoutError('leaving Ray')", 1)]
)
def test_a_worker_leaves_though_a_thread_hangs(error: str, code: int) -> None:
    program = HANGING.format(error=error)
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True)
    assert ended.returncode == code, ended.stderr
