"""SGLang's own benchmark client on given prompts, told to say when it was busy.

    PYTHON_WITH_SGLANG benchmarks/sglang_client.py REQUESTS.json TIMES.json [its arguments ...]

It is ``python -m sglang.bench_serving`` with two additions. The requests, a list of token ids and
numbers of new tokens ``{"ids", "new"}``, come from a file instead of one of its data sets. What it
knows of each answer goes to ``TIMES.json``: when it sent the request and had the whole answer (its
clock, seconds), tokens, and its processor time from the first request to the last answer. Its own
arguments and its own code between request and answer are untouched.
"""

import importlib.util
import json
import sys
import time
import types
from pathlib import Path
from typing import Any


def main(requests: str, times: str, arguments: list[str]) -> None:
    """Run the client."""
    if importlib.util.find_spec("datasets") is None:
        # Imported by the client for a data set of pictures that is not used here.
        stand_in: Any = types.ModuleType("datasets")
        stand_in.load_dataset = None
        sys.modules["datasets"] = stand_in
    from sglang.benchmark import serving
    from sglang.benchmark.datasets import DatasetRow

    begun = {"cpu": 0.0}
    measure = serving.calculate_metrics

    def rows(*_: Any) -> list[Any]:
        told = json.loads(Path(requests).read_text())
        begun["cpu"] = time.process_time()
        return [
            DatasetRow(prompt=each["ids"], prompt_len=len(each["ids"]), output_len=each["new"])
            for each in told
        ]

    def measured(*given: Any, **named: Any) -> Any:
        cpu = time.process_time() - begun["cpu"]
        Path(times).write_text(json.dumps({"cpu_seconds": cpu, "answers": spans(named["outputs"])}))
        return measure(*given, **named)

    serving.get_dataset = rows
    serving.calculate_metrics = measured
    sys.argv = ["bench_serving", *arguments]
    serving.cli_main()


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
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
