"""How long ``perdure status`` takes, beside what no command line in Python can avoid.

    python benchmarks/status_latency.py RUN|ROOT [--rounds 9]

Each round starts three fresh processes: one that imports Temporal's client and nothing else, one
``status RUN``, and one ``status RUN --verify``. Wall and processor seconds (user and system, the
child's own) are medians over the rounds; the ratio is of processor seconds, because those do not
depend on what else the machine does. Nothing is judged.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 120.0


class Cost(NamedTuple):
    """Of one process."""

    wall_s: float
    cpu_s: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    commands = {
        "import temporalio.client": ["-c", "import temporalio.client"],
        "status": ["-m", "workers", "status", options.run, "--json"],
        "status --verify": ["-m", "workers", "status", options.run, "--json", "--verify"],
    }
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, arguments in commands.items():
            costs[name].append(cost_of(arguments))
    least = median([each.cpu_s for each in costs["import temporalio.client"]])
    print(f"{'command':<26}{'wall s':>8}{'CPU s':>8}{'ratio':>8}   load {os.getloadavg()[0]:.1f}")
    for name, found in costs.items():
        wall, cpu = median([each.wall_s for each in found]), median([each.cpu_s for each in found])
        print(f"{name:<26}{wall:>8.2f}{cpu:>8.2f}{cpu / least:>8.1f}")


def median(values: list[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def cost_of(arguments: list[str]) -> Cost:
    """Run one Python process to its end; its exit code does not matter here."""
    before, started = children_cpu_s(), time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        check=False,
    )
    return Cost(time.perf_counter() - started, children_cpu_s() - before)


def children_cpu_s() -> float:
    """Processor seconds of all ended children of this process."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
