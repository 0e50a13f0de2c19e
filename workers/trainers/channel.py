"""A process group of the trainer's first rank and the engines' processes: broadcasts of weights.

::

    open: a store on a port of this host -> connect: all members meet there -> broadcast, ...

The engines are told store and name over HTTP and join the group with SGLang's own function, so the
group is made here as it is made there.
"""

import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from models.errors import ContractViolation, ServiceUnreachable
from models.ports import EngineHandle
from models.publication import WeightChannel

_POLL_S = 0.0005
_LOOPBACK = "127.0.0.1"


class Channel:
    """One group. After a failure it is of no use: its members may be anywhere in a broadcast."""

    def __init__(self, engines: Sequence[EngineHandle], timeout_s: float) -> None:
        """Open a store for ``engines``: on loopback, if all are there, else on the host's address.

        ``timeout_s``: seconds for them to come, and for each broadcast.
        """
        hosts = {urlsplit(engine.url).hostname for engine in engines}
        address = _LOOPBACK if hosts == {_LOOPBACK} else socket.gethostbyname(socket.gethostname())
        self._deadline = timedelta(seconds=timeout_s)
        self._socket = socket.create_server((address, 0))
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            self._socket.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=self._deadline,
            master_listen_fd=self._socket.fileno(),
        )
        self._socket.detach()  # the store closes it
        self._group: dist.ProcessGroup | None = None
        processes = sum(max(1, len(engine.gpus)) for engine in engines)
        self._members = _members(engines)
        self.info = WeightChannel(
            name=f"weights-{secrets.token_hex(8)}",
            address=address,
            port=self._store.port,
            world=1 + processes,
            backend="nccl" if torch.cuda.is_available() else "gloo",
        )

    def serves(self, engines: Sequence[EngineHandle]) -> bool:
        """Whether exactly ``engines`` have joined, in this order."""
        return self.info.connected and self._members == _members(engines)

    def connect(self) -> None:
        """Meet the engines; they must be on their way.

        Raises:
            ServiceUnreachable: one of them does not come.
        """
        info = self.info
        try:
            self._group, _ = c10d._new_process_group_helper(
                info.world,
                0,
                [],
                c10d.Backend(info.backend),
                c10d.PrefixStore(info.name, self._store),
                group_name=info.name,  # type: ignore[arg-type]  # a plain text before torch 2.12
                timeout=self._deadline,
            )
        except RuntimeError as error:  # so is torch's DistError
            raise ServiceUnreachable(f"engines did not come to {info.name}: {error}") from error
        # As torch's own constructors do, and as its end of a group expects.
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(info.world)}
        self.info = info.model_copy(update={"connected": True})

    def broadcast(self, flat: Tensor) -> None:
        """Send ``flat`` ([bytes] uint8) to every member; returns when all have it.

        Raises:
            ServiceUnreachable: a member is gone or does not take it in time.
        """
        if self._group is None:
            raise ContractViolation(f"{self.info.name} is not connected")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        end = time.monotonic() + self._deadline.total_seconds()
        try:
            work = self._group.broadcast([flat], options)
            # Without a deadline of its own NCCL would wait for a member that died for minutes.
            while not work.is_completed():
                if time.monotonic() > end:
                    raise ServiceUnreachable(
                        f"{self.info.name}: no end of a broadcast within {self._deadline}"
                    )
                time.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            raise ServiceUnreachable(f"{self.info.name}: {error}") from error
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)

    def close(self) -> None:
        """End the group without waiting for its members."""
        if self._group is None:
            return
        group, self._group = self._group, None
        if self.info.backend == "nccl":
            group.abort()
        dist.destroy_process_group(group)


def _members(engines: Sequence[EngineHandle]) -> tuple[tuple[str, int], ...]:
    """Who takes part, by name and incarnation, in the order of ranks."""
    return tuple((engine.name, engine.incarnation) for engine in engines)
