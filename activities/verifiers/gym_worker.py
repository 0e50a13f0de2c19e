"""A worker process of the gym verifier: one JSON line in, one JSON line out.

Scorers may print; what they print goes to standard error, so that it cannot forge an answer.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

_PR_SET_PDEATHSIG = 1


@cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    return scorer


def grade(entry: dict[str, Any], text: str) -> float:
    """Score of what stands in the last ``<answer>`` tag of ``text``, or of all of it."""
    answer = extract_answer(text)
    if answer is None:
        answer = text.strip()
    return float(_scorer(entry["metadata"]["source_dataset"])(answer, entry))


def _answer(line: str) -> dict[str, Any]:
    try:
        task = json.loads(line)
        return {"score": grade(task["entry"], task["text"])}
    except Exception as error:  # process entry: whatever a scorer raises is its verdict
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even in the middle of a hang."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Answer lines until standard input ends."""
    _end_with_parent()
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    protocol.write('{"ready": true}\n')
    protocol.flush()
    for line in sys.stdin:
        protocol.write(json.dumps(_answer(line)) + "\n")
        protocol.flush()


if __name__ == "__main__":
    main()
