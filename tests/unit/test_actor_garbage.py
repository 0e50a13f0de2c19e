"""What an actor holds for its whole life is not searched for garbage again and again."""

import subprocess
import sys

PROGRAM = """
import gc
from workers.actors.garbage import freeze_living_objects

class Loop:
    def __init__(self):
        self.me = self

kept = [[each] for each in range(10_000)]
gc.disable()
freeze_living_objects()
assert gc.get_freeze_count() > 10_000
assert len(gc.get_objects()) < 1_000  # of what a later search walks
del kept
for _ in range(100):
    Loop()
assert gc.collect() >= 100  # what becomes garbage afterwards is found
"""


def test_only_what_is_made_afterwards_is_searched():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
