"""What ``gpu_smoke.sh`` must see: a reward that rises, an engine that is killed and replaced.

    python scripts/gpu_smoke_checks.py rises RESULT LEAST      of the JSON line of `perdure run`
    python scripts/gpu_smoke_checks.py kill ROOT UPDATES S     kill the engine after so many updates
    python scripts/gpu_smoke_checks.py recovered ROOT UPDATES  the run went on to its horizon
    python scripts/gpu_smoke_checks.py stages ROOT             median seconds of every stage

Exit code 1 with a sentence when it is not so.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

POLL_S = 0.2


def rises(result: str, least: str) -> None:
    """The mean reward of the last tenth of the updates exceeds that of the first by ``least``."""
    lines = Path(result).read_text().splitlines()
    told: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    first, last = told.get("reward_first"), told.get("reward_last")
    if told.get("state") != "complete" or first is None or last is None:
        sys.exit(f"the run did not complete: {told}")
    print(f"reward {first:.3f} -> {last:.3f} in {told['updates']} updates, {told['seconds']:.0f} s")
    if last - first < float(least):
        sys.exit(f"the reward rose by {last - first:.3f}, at least {least} was expected")


def kill(root: str, updates: str, timeout_s: str) -> None:
    """SIGKILL to the engine that ``fleet.json`` names, once ``updates`` updates are done."""
    deadline = time.monotonic() + float(timeout_s)
    while _num_updates(Path(root)) < int(updates):
        if _state(Path(root)) == "failed":
            sys.exit("the run failed before its engine could be killed")
        if time.monotonic() > deadline:
            sys.exit(f"{_num_updates(Path(root))} of {updates} updates within {timeout_s} s")
        time.sleep(POLL_S)
    engine = _engine(Path(root))
    os.kill(engine["pid"], signal.SIGKILL)
    print(f"killed engine-0, process {engine['pid']}, after {_num_updates(Path(root))} updates")
    _wait_for_another(Path(root), engine, deadline)


def recovered(root: str, updates: str) -> None:
    """The run reached its horizon with an engine that is not its first."""
    state, done, life = (
        _state(Path(root)),
        _num_updates(Path(root)),
        _engine(Path(root))["incarnation"],
    )
    print(f"state {state}, {done} updates, engine in its life {life}")
    if (state, done) != ("complete", int(updates)) or life < 1:
        sys.exit(f"expected a complete run of {updates} updates with a replaced engine")


def stages(root: str) -> None:
    """Seconds of the driver's stages; the first update, which warms up, is left out."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for line in Path(root, "checkpoints", "driver_timing.jsonl").read_text().splitlines():
        row = json.loads(line)
        if (row["rollout_id"] or 0) > 0:
            seconds[row["stage"]].append(row["seconds"])
    for stage, values in seconds.items():
        print(f"{stage:<14}{len(values):>4} x {statistics.median(values):8.3f} s (median)")


def _wait_for_another(root: Path, killed: dict[str, Any], deadline: float) -> None:
    """Until another life of the engine serves."""
    started = time.monotonic()
    while True:
        engine = _engine(root)
        if engine["incarnation"] > killed["incarnation"] and engine["url"]:
            print(f"replaced after {time.monotonic() - started:.1f} s")
            return
        if time.monotonic() > deadline:
            sys.exit(f"no other engine before the deadline: {engine}")
        time.sleep(POLL_S)


def _state(root: Path) -> str:
    file = root / "workflow.json"
    return str(json.loads(file.read_text())["status"]) if file.exists() else "preparing"


def _engine(root: Path) -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads((root / "fleet.json").read_text())
    return next(row for row in rows if (row["role"], row["rank"]) == ("engine", 0))


def _num_updates(root: Path) -> int:
    file = root / "checkpoints" / "updates.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


CHECKS = {"rises": rises, "kill": kill, "recovered": recovered, "stages": stages}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](*sys.argv[2:])
