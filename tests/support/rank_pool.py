"""Processes of one test session that are the ranks of one process group, and do what tests ask."""

import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from models.errors import PerdureError

COLLECTIVE_TIMEOUT_S = 60.0
DEADLINE_S = 90.0


class RankError(AssertionError):
    """What a rank raised that was no error of Perdure."""


class RankPool:
    """``world`` ranks over gloo, one thread each."""

    def __init__(self, world: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._ends: list[multiprocessing.connection.Connection] = []
        self._processes = []
        self._asked = 0
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, str(folder / "meet"), rank, world), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, own: Sequence[Any] = ()) -> list[Any]:
        """``function(ranks, *args)`` on every rank at once; what each returned.

        An error of Perdure is returned, not raised. ``own``: a last argument of each rank's own.
        """
        self._asked += 1
        for rank, end in enumerate(self._ends):
            end.send((self._asked, function, (*args, own[rank]) if own else args))
        return [self._answer(end) for end in self._ends]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join(DEADLINE_S)

    def _answer(self, end: multiprocessing.connection.Connection) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        number = None
        while number != self._asked:  # of an earlier test, which did not wait for it any longer
            assert end.poll(max(0.0, deadline - time.monotonic())), "a rank does not answer"
            number, kind, value = end.recv()
        if kind == "broken":
            raise RankError(value)
        return value


def _serve(end: multiprocessing.connection.Connection, meeting: str, rank: int, world: int) -> None:
    import torch

    from workers.trainers.process_ranks import join_ranks

    torch.set_num_threads(1)
    ranks = join_ranks(Path(meeting), rank, world, COLLECTIVE_TIMEOUT_S)
    while True:
        try:
            number, function, args = end.recv()
        except EOFError:
            return
        try:
            end.send((number, "done", function(ranks, *args)))
        except PerdureError as error:
            end.send((number, "done", error))
        except Exception:
            end.send((number, "broken", traceback.format_exc()))
