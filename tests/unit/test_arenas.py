"""Threads of a worker share memory; glibc itself says how many arenas there are."""

import ctypes
import subprocess
import sys

import pytest

from workers.arenas import VARIABLE

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc, which tells of its arenas"
)

THREADS = """
import ctypes, threading
from workers.arenas import keep_few_arenas
{call}
barrier = threading.Barrier(13)
def hold():
    kept = [bytes(5000) for _ in range(100)]
    barrier.wait(30)
    barrier.wait(30)
    del kept
threads = [threading.Thread(target=hold) for _ in range(12)]
for thread in threads:
    thread.start()
barrier.wait(30)
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
stream = libc.fdopen(1, b"w")
libc.malloc_info(0, ctypes.c_void_p(stream))
libc.fflush(ctypes.c_void_p(stream))
barrier.wait(30)
"""


def arenas(call: str, **env: str) -> int:
    """That twelve threads have which hold memory at once."""
    command = [sys.executable, "-c", THREADS.format(call=call)]
    done = subprocess.run(
        command, env={"PATH": "", **env}, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.count("<heap nr=")


def test_threads_share_two_arenas() -> None:
    assert arenas("") > 3
    assert arenas("keep_few_arenas()") <= 2


def test_what_a_user_asks_for_stands() -> None:
    assert arenas("keep_few_arenas()", **{VARIABLE: "5"}) > 2
