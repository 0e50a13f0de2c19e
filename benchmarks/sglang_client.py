"""SGLang's own benchmark client on given prompts, told to say when it was busy.

    PYTHON_WITH_SGLANG benchmarks/sglang_client.py

It is ``python -m sglang.bench_serving`` with two additions. The requests, a list of token ids and
numbers of new tokens ``{"ids", "new"}``, come from a file instead of one of its data sets. What it
knows of each answer goes to another file: when it sent the request and had the whole answer (its
clock, seconds), tokens, and its processor time from the first request to the last answer. Its own
arguments and its own code between request and answer are untouched.

Its imports take half a minute, so one process runs it many times: it says ``ready``, reads a line
``{"requests": PATH, "times": PATH, "arguments": [...]}`` at a time, and says ``done`` after each.
What the client itself prints goes to standard error.
"""

import importlib.util
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the client as often as it is asked to."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    client = Client()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        client.run(Path(told["requests"]), Path(told["times"]), told["arguments"])
        print("done", file=answers, flush=True)


class Client:
    """SGLang's client with its data set and its report taken over."""

    def __init__(self) -> None:
        if importlib.util.find_spec("datasets") is None:
            # Imported by the client for a data set of pictures that is not used here.
            stand_in: Any = types.ModuleType("datasets")
            stand_in.load_dataset = None
            sys.modules["datasets"] = stand_in
        from sglang.benchmark import serving
        from sglang.benchmark.datasets import DatasetRow

        self._row = DatasetRow
        self._serving = serving
        self._report = serving.calculate_metrics

    def run(self, requests: Path, times: Path, arguments: list[str]) -> None:
        """One run of the client with ``arguments``; ends the process when a request failed."""
        begun = 0.0

        def rows(*_: Any) -> list[Any]:
            nonlocal begun
            told = json.loads(requests.read_text())
            begun = time.process_time()
            return [
                self._row(prompt=each["ids"], prompt_len=len(each["ids"]), output_len=each["new"])
                for each in told
            ]

        def report(*given: Any, **named: Any) -> Any:
            cpu = time.process_time() - begun
            found = {"cpu_seconds": cpu, "answers": spans(named["outputs"])}
            times.write_text(json.dumps(found))
            return self._report(*given, **named)

        self._serving.get_dataset = rows
        self._serving.calculate_metrics = report
        sys.argv = ["bench_serving", *arguments]
        self._serving.cli_main()


def spans(outputs: list[Any]) -> list[dict[str, Any]]:
    """Begin, end and tokens of every answer; ends with an error when one failed."""
    failed = [each.error for each in outputs if not each.success]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first one with: {failed[0]}")
    return [
        {
            "begin": each.start_time,
            "end": each.start_time + each.latency,
            "tokens": each.output_len,
        }
        for each in outputs
    ]


if __name__ == "__main__":
    main()
