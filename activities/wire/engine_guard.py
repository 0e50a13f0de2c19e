"""What one client knows of its engine, and what it must therefore not send.

An SGLang server ends with all its processes when it is told to flush its cache while a request is
paused, to receive weights through a group that it does not know, or to give back memory while it
is busy. None of this can be asked of it beforehand, so the client remembers what it did itself:
pause, update and resume an engine with one client.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from activities.wire.contract import PauseMode
from activities.wire.memory_marks import MemoryState
from models.errors import ContractViolation
from models.publication import TensorMeta

BUCKET = "flattened_bucket"
"""The load format of tensors that travel as one."""


class EngineGuard:
    """Bookkeeping of one client. Every refusal is a ``ContractViolation`` that says what to do."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._mode: PauseMode | None = None
        self.at_rest = False
        """Paused with ``abort``, and its scheduler has come to the end of what it computed."""
        self._used_groups: set[str] = set()
        self._groups: set[str] = set()

    def pausing(self, mode: PauseMode) -> None:
        """A pause is being sent; ``abort`` counts when it is answered, see ``paused``."""
        self.at_rest = False
        if mode != "abort":
            self._mode = mode

    def paused(self, mode: PauseMode) -> None:
        """The engine is paused. After ``abort`` it owes nothing, whatever it was before."""
        self._mode = mode

    def settled(self) -> None:
        """The engine was seen without work; while it is paused nothing gives it any."""
        self.at_rest = self._mode == "abort"

    def resumed(self) -> None:
        """The engine takes requests again."""
        self._mode = None
        self.at_rest = False

    def require_paused(self, what: str, *, idle: bool) -> None:
        """Refuse ``what`` unless this client paused the engine; ``idle``: and ended its requests.

        Raises:
            ContractViolation: it did not, or left requests waiting in the engine.
        """
        if self._mode is None:
            raise self._refusal(what, 'it was not paused by this client: pause("abort") it first')
        if idle and self._mode != "abort":
            raise self._refusal(
                what,
                f"it was paused with {self._mode!r} and may hold requests, which ends it: "
                'pause("abort") it first',
            )

    def opening_group(self, name: str) -> None:
        """An update group is being made; a name serves one attempt.

        Raises:
            ContractViolation: the name is empty or was used before.
        """
        if not name or name in self._used_groups:
            raise self._refusal("init_weights_update_group", f"the group name {name!r} is used up")
        self._used_groups.add(name)

    def opened_group(self, name: str) -> None:
        """The engine has joined it."""
        self._groups.add(name)

    def closed_group(self, name: str) -> None:
        """The engine has left it, or is about to."""
        self._groups.discard(name)

    def require_broadcast(self, group: str, tensors: Collection[TensorMeta]) -> None:
        """Refuse an update through a group that the engine did not join, or without tensors.

        Raises:
            ContractViolation: this client did not initialize it, or tensors repeat or are missing.
        """
        what = "update_weights_from_distributed"
        if group not in self._groups:
            raise self._refusal(what, f"this client initialized no group {group!r}")
        if not tensors or len({each.name for each in tensors}) != len(tensors):
            raise self._refusal(what, "there is no tensor, or one is named twice")

    def require_memory(self, what: str, state: MemoryState, *, all_of_it: bool) -> None:
        """Refuse ``what`` on an engine without its weights; ``all_of_it``: without any memory.

        Raises:
            ContractViolation: memory was given back, or nobody knows what was.
        """
        self.require_known(what, state)
        missing = state.released if all_of_it else state.released & {"weights"}
        if missing:
            raise self._refusal(
                what, f"it gave back {', '.join(sorted(missing))}: resume_memory() first"
            )

    def require_known(self, what: str, state: MemoryState) -> None:
        """Refuse ``what`` on an engine that may or may not have given memory back."""
        if not state.is_known:
            raise self._refusal(
                what, "nobody knows which memory it has (a call that moved it was cut off): replace"
            )

    def require_saver(self, info: Mapping[str, Any]) -> None:
        """Refuse to take memory from a server that was not started for it."""
        if info.get("enable_memory_saver") is not True:
            raise self._refusal(
                "release_memory_occupation",
                "it was started without --enable-memory-saver (placement.mode colocated sets it)",
            )

    def require_handles(self, handles: Mapping[str, str], engine_gpus: Sequence[str]) -> None:
        """Refuse memory that a process of the engine could not open.

        Raises:
            ContractViolation: a GPU of the engine's has no handle, or it has none itself.
        """
        missing = [gpu for gpu in engine_gpus if gpu not in handles]
        if missing or not engine_gpus:
            raise self._refusal(
                "update_weights_from_tensor",
                f"it computes on {_listed(engine_gpus)}, the weights lie on {_listed(handles)}",
            )

    def _refusal(self, what: str, why: str) -> ContractViolation:
        return ContractViolation(f"{self._url}: {what} is not sent: {why}")


def _listed(gpus: Collection[str]) -> str:
    return ", ".join(gpus) or "nothing that is known"
