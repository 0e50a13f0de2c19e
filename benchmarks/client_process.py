"""SGLang's own benchmark client as the other side of ``engine_throughput.py``, and what is asked.

No benchmark itself: ``sglang_client.py`` is run in a process of SGLang's environment, given the
requests of a ``Load``, and its answers are counted as those of our producer are.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.run import RunSpec
from workers.engines.sglang.arguments import server_environment
from workers.engines.sglang.installed import sglang_python

CLIENT = Path(__file__).with_name("sglang_client.py")
ROUND_DEADLINE_S = 900.0
REQUESTS, TIMES, OWN, LOG = "requests.json", "times.json", "client.jsonl", "client.log"


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of both sides."""

    concurrency: int
    waves: int
    siblings: int
    new_tokens: int
    prompts: list[list[int]]
    """Those of the groups, in order, spare ones at the end."""

    @property
    def groups(self) -> int:
        """Groups of one wave."""
        return self.concurrency // self.siblings

    def requests(self) -> list[dict[str, Any]]:
        """Of side (b), siblings next to each other."""
        counted = self.prompts[: (self.waves + 1) * self.groups]
        return [
            {"ids": prompt, "new": self.new_tokens}
            for prompt in counted
            for _ in range(self.siblings)
        ]


class PeerProcess:
    """SGLang's client in a process that imports it once."""

    def __init__(self, child: asyncio.subprocess.Process, log: Path) -> None:
        self._child = child
        self._log = log

    async def hear(self, word: str) -> None:
        """Wait until it says ``word``; ends with the end of its log when it says anything else."""
        assert self._child.stdout is not None
        async with asyncio.timeout(ROUND_DEADLINE_S):
            said = (await self._child.stdout.readline()).decode().strip()
        if said != word:
            raise SystemExit(f"SGLang's client failed:\n{self._log.read_text()[-2000:]}")

    async def run(self, model: Path, url: str, load: Load, root: Path) -> dict[str, float]:
        """Side (b): one run of the client."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(client_order(model, url, load, root)).encode() + b"\n")
        await self._child.stdin.drain()
        await self.hear("done")
        return client_figures(root, load.concurrency)


@asynccontextmanager
async def sglang_client(spec: RunSpec, scratch: Path) -> AsyncIterator[PeerProcess]:
    """The client's process; it ends with the block."""
    path = scratch / LOG
    with path.open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            *(sglang_python(), str(CLIENT)),
            env={**os.environ, "OMP_NUM_THREADS": "1", **server_environment(spec)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    peer = PeerProcess(child, path)
    try:
        await peer.hear("ready")
        yield peer
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def client_order(model: Path, url: str, load: Load, root: Path) -> dict[str, Any]:
    """What the client's process is asked for, the requests written to ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    (root / OWN).unlink(missing_ok=True)  # the client adds a line to what is there
    (root / REQUESTS).write_text(json.dumps(load.requests()))
    return {
        "requests": str(root / REQUESTS),
        "times": str(root / TIMES),
        "arguments": client_options(model, url, load, root / OWN),
    }


def client_figures(root: Path, concurrency: int) -> dict[str, float]:
    """What the client left in ``root``, counted as the producer is."""
    measured = json.loads((root / TIMES).read_text())
    row = steady(measured["answers"], concurrency, measured["cpu_seconds"])
    return row | {"own_tokens_per_s": json.loads((root / OWN).read_text())["output_throughput"]}


def client_options(model: Path, url: str, load: Load, out: Path) -> list[str]:
    """Options of SGLang's client; the data set is replaced by the file of requests."""
    return [
        *("--backend", "sglang", "--base-url", url, "--model", str(model)),
        *("--dataset-name", "random-ids", "--tokenize-prompt"),
        *("--num-prompts", str(len(load.requests())), "--max-concurrency", str(load.concurrency)),
        *("--temperature", "1.0", "--return-logprob", "--disable-stream", "--disable-tqdm"),
        *("--warmup-requests", "0", "--ready-check-timeout-sec", "0"),
        *("--output-file", str(out)),
    ]


def steady(
    answers: Sequence[dict[str, float]], concurrency: int, cpu_seconds: float
) -> dict[str, float]:
    """Figures of a client from the time of each answer; the first ``concurrency`` do not count.

    ``cpu_seconds`` are those of all answers.
    """
    ends = sorted(answers, key=lambda answer: answer["end"])
    seconds = ends[-1]["end"] - ends[concurrency - 1]["end"]
    tokens = sum(answer["tokens"] for answer in ends[concurrency:])
    share = tokens / sum(answer["tokens"] for answer in answers)
    return rates(tokens, seconds, cpu_seconds * share)


def rates(tokens: float, seconds: float, cpu: float) -> dict[str, float]:
    """The figures of a round."""
    return {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "cpu_us_per_token": 1e6 * cpu / tokens,
    }
