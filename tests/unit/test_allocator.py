"""What is freed goes back to the system, in a process of its own."""

import json
import subprocess
import sys

SCRIPT = """
import json, psutil
from workers.actors.allocator import return_freed_memory

def resident():
    return psutil.Process().memory_info().rss

return_freed_memory()
# each freed block raises glibc's own threshold for mapped blocks to its size
for size in (1, 2, 4, 8, 16):
    bytearray(size << 20)
before = resident()
pinned = []
blocks = []
for _ in range(64):
    block = bytearray(1 << 20)
    block[::4096] = bytes(256)
    blocks.append(block)
    pinned.append(bytearray(1024))  # on top of the heap: nothing below could be trimmed
full = resident()
del block
blocks.clear()
print(json.dumps({
    "grown": full - before,
    "kept": resident() - before,
}))
"""


def test_large_blocks_do_not_stay_in_the_heap() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50, check=True
    )
    told = json.loads(done.stdout)
    assert told["grown"] >= 60 << 20
    assert told["kept"] < 8 << 20
