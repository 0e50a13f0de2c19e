"""Two hosts on one machine: network namespaces that a virtual cable connects.

Nothing of one is in reach of the other but by the addresses of the cable; loopback is each one's
own. Files are shared, as on hosts with a common file system.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

COMMAND_S = 30.0


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What goes before a command that is to run there."""
        return ("ip", "netns", "exec", self.name)

    def pids(self) -> list[int]:
        """Every process in it."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """The host is gone: SIGKILL to each of its processes, and wait until they have ended."""
        for _ in range(2):  # one may have been starting another
            doomed = []
            for pid in self.pids():
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    doomed.append(psutil.Process(pid))
                    os.kill(pid, signal.SIGKILL)
            psutil.wait_procs(doomed, timeout=COMMAND_S)


def why_not() -> str | None:
    """What is missing to make namespaces; None when nothing is."""
    if shutil.which("ip") is None:
        return "the program ip (package iproute2) is missing"
    name = f"perdure-probe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two connected hosts; their processes end with the block."""
    key = os.getpid()
    hosts = (Host(f"perdure-a-{key}", "10.213.7.1"), Host(f"perdure-b-{key}", "10.213.7.2"))
    ends = (f"pda{key}", f"pdb{key}")
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            _ip("link", "set", end, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", end)
            for device in ("lo", end):
                _ip("-n", host.name, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.kill()
                _ip("netns", "del", host.name)


def _ip(*arguments: str) -> str:
    return subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=True
    ).stdout
