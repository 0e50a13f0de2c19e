"""Which Temporal server a command talks to, without talking to it yet.

``--address`` wins over ``TEMPORAL_ADDRESS`` and ``TEMPORAL_PROFILE``, and those win over the
embedded stack, which only commands that start runs bring up.
"""

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.errors import ServiceUnreachable
from workers.local_stack import StackInfo, StackStatus, ensure_stack, stack_status

DEFAULT_ADDRESS = "localhost:7233"


@dataclass(frozen=True, slots=True)
class Place:
    """A Temporal server to talk to."""

    address: str | None
    """host:port; none: whatever the Temporal profile says."""
    ui: str | None = None
    stack: StackInfo | None = None
    """Set when it is the embedded stack's."""

    def stock(self, *arguments: str) -> str:
        """The equivalent command line of the stock ``temporal`` program, whatever its shell."""
        address = ["--address", self.address] if self.address else []
        return shlex.join(["temporal", *arguments, *address, *self._namespace()])

    def _namespace(self) -> list[str]:
        """As the connection has it: see ``workers.connection.connect``."""
        if self.stack is not None:
            return ["--namespace", "default"]
        profile = os.environ.get("TEMPORAL_PROFILE")
        named = os.environ.get("TEMPORAL_NAMESPACE")
        words = ["--profile", profile] if profile else []
        if named or not (profile or _has_profiles()):
            words += ["--namespace", named or "default"]
        return words


def find_place(address: str | None) -> Place:
    """The server to talk to; the embedded stack must be running already when it is meant.

    Raises:
        ServiceUnreachable: no server is named and no embedded stack runs.
    """
    named = _named(address)
    if named is not None:
        return named
    status = stack_status()
    if status is None or not _runs(status):
        raise ServiceUnreachable(
            "no Temporal server is named and the embedded stack is not running; "
            "start it with `perdure up`, or set TEMPORAL_ADDRESS"
        )
    return _of_stack(status.info)


def ensure_place(address: str | None, notice: Callable[[str], None]) -> Place:
    """The server to talk to; brings the embedded stack up when no server is named."""
    return _named(address) or _of_stack(ensure_stack(notice=notice))


def stack_runs() -> bool:
    """Whether the embedded stack runs; its environment is then that of who started it."""
    status = stack_status()
    return status is not None and _runs(status)


def is_named(address: str | None) -> bool:
    """Whether the caller or the environment names a server, so that no stack is needed."""
    return _named(address) is not None


def _has_profiles() -> bool:
    """Whether a configuration file of Temporal's may name a namespace; ``temporal`` reads it."""
    named = os.environ.get("TEMPORAL_CONFIG_FILE")
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(named or Path(base) / "temporalio" / "temporal.toml").is_file()


def _runs(status: StackStatus) -> bool:
    return any(process.alive for process in status.processes)


def _named(address: str | None) -> Place | None:
    named = address or os.environ.get("TEMPORAL_ADDRESS")
    if named:
        return Place(named)
    return Place(None) if os.environ.get("TEMPORAL_PROFILE") else None


def _of_stack(info: StackInfo) -> Place:
    return Place(info.temporal_address, info.temporal_ui, info)
