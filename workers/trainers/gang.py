"""The other ranks of a trainer: child processes of the process that is rank 0.

    trainer actor = rank 0 --stdin, a command a line--> rank 1, rank 2, ...
                         <------ torch.distributed ----->

All are on one host. A child ends when its standard input does, and the kernel ends it with its
parent. Ranks compute in step, so the end of one is the end of all: nobody takes its place.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import structlog

from models.base import Frozen
from models.errors import PerdureError, TrainerLost
from models.ids import RunRef
from workers.engines.process import leashed

MODULE = "workers.trainers.rank_process"
MODULES_CACHE = "HF_MODULES_CACHE"
_LAST_WORDS_S = 1.0
"""How long a broken collective waits for the exit of the rank that broke it."""
_FOLLOWER_S = 0.5
"""How long the exit of a rank that was not killed waits for that of one that was: a rank ends with
an error when another one leaves a collective. Less than ``_LAST_WORDS_S``."""
_CLOSE_S = 3.0
_COMMUNICATION = ("gloo", "nccl", "connection", "timed out", "timeout")

_log = structlog.get_logger(__name__)


class RankOrder(Frozen):
    """What one rank is started with: the first line of its standard input."""

    run: RunRef
    rank: int
    world: int
    rendezvous: str
    """A file that does not exist yet, where the ranks find each other."""
    timeout_s: float
    """For the ranks to meet, and for every collective."""


def private(env: Mapping[str, str], rank: int) -> dict[str, str]:
    """``env`` with a cache of generated model code of this rank's own: sharing one is a race."""
    modules = env.get(MODULES_CACHE)
    return {**env, MODULES_CACHE: f"{modules}-rank{rank}"} if modules else dict(env)


class Gang:
    """The processes of ranks 1 and up."""

    def __init__(self, order: RankOrder, on_loss: Callable[[int, str], None]) -> None:
        """``on_loss``: told, in a thread of its own, which rank ended by itself, and how."""
        self._order = order
        self._on_loss = on_loss
        self._members: list[_Member] = []
        self._closing = False
        self._lost = ""
        self._loss = threading.Event()

    @classmethod
    def start(
        cls,
        order: RankOrder,
        env: Mapping[str, str],
        logs: Path,
        on_loss: Callable[[int, str], None],
    ) -> "Gang":
        """Start every rank but the first; they wait for it at ``order.rendezvous``.

        Args:
            order: that of rank 0.
            env: environment of the processes.
            logs: folder of ``trainer-rank1.log`` and so on.
            on_loss: see above.
        """
        gang = cls(order, on_loss)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(1, order.world):
                log = logs / f"trainer-rank{rank}.log"
                member = _Member(rank, private(env, rank), log, gang._ended)
                gang._members.append(member)
                member.tell(order.model_copy(update={"rank": rank}).model_dump_json())
        except BaseException:
            gang.close()
            raise
        return gang

    @property
    def alive(self) -> bool:
        """Whether every rank runs and is in step."""
        return not (self._closing or self._lost)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return tuple(member.pid for member in self._members)

    @contextlib.contextmanager
    def told(self, command: str) -> Iterator[None]:
        """Tell the ranks a command (one line of JSON), which the block does on rank 0.

        Raises:
            TrainerLost: a rank has ended, or does not come to a collective. The others are ended.
        """
        in_step = False
        try:
            self._tell(command)
            yield
            in_step = True
        except TrainerLost:
            raise
        except PerdureError:
            in_step = True
            raise
        except RuntimeError as error:
            self._refuse_broken(error)
            raise
        finally:
            if not in_step:
                self.close()

    def close(self) -> None:
        """End the ranks. One that hangs is killed."""
        self._closing = True
        deadline = time.monotonic() + (_CLOSE_S if not self._lost else 0.0)
        for member in self._members:
            member.dismiss()
        for member in self._members:
            member.end(max(0.0, deadline - time.monotonic()))

    def _tell(self, command: str) -> None:
        if not self.alive:
            raise TrainerLost(self._lost or "the ranks of the trainer were ended")
        try:
            for member in self._members:
                member.tell(command)
        except OSError as error:
            raise TrainerLost(self._reason(f"cannot be told a command: {error}")) from error

    def _refuse_broken(self, error: RuntimeError) -> None:
        """Raise TrainerLost when ``error`` is a broken collective, not one of rank 0 itself."""
        text = str(error).lower()
        if self._loss.wait(_LAST_WORDS_S) or any(word in text for word in _COMMUNICATION):
            raise TrainerLost(self._reason(f"fell out of step: {error}")) from error

    def _reason(self, otherwise: str) -> str:
        self._loss.wait(_LAST_WORDS_S)
        return self._lost or f"the ranks of the trainer {otherwise}"

    def _ended(self, rank: int, how: str, was_killed: bool) -> None:
        if not was_killed and not self._closing:
            self._loss.wait(_FOLLOWER_S)
        if self._closing or self._lost:
            return
        self._lost = f"rank {rank} of {self._order.world} of the trainer {how}"
        self._loss.set()
        _log.error("trainer rank lost", reason=self._lost)
        self._on_loss(rank, self._lost)


class _Member:
    """One child. The thread that starts it waits for its end: the kernel ties it to that thread."""

    def __init__(
        self, rank: int, env: dict[str, str], log: Path, on_end: Callable[[int, str, bool], None]
    ) -> None:
        self._rank = rank
        self._env = env
        self._log = log
        self._on_end = on_end
        self._started = threading.Event()
        self._ended = threading.Event()
        self._failure: OSError | None = None
        threading.Thread(target=self._live, name=f"rank-{rank}", daemon=True).start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        """Write one line. Raises OSError when nobody reads any more."""
        self._input.write(line.encode() + b"\n")
        self._input.flush()

    def dismiss(self) -> None:
        """End its input."""
        with contextlib.suppress(OSError):
            self._input.close()

    def end(self, grace_s: float) -> None:
        """Wait for its end; after ``grace_s`` seconds kill it."""
        self._ended.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._ended.wait(_CLOSE_S)

    def _live(self) -> None:
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    leashed((sys.executable, "-m", MODULE)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self._env,
                    process_group=0,
                )
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        code = self._process.wait()
        self._ended.set()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self._on_end(self._rank, f"{how}; its log is {self._log}", code < 0)

    @property
    def _input(self) -> IO[bytes]:
        stream = self._process.stdin
        assert stream is not None
        return stream
