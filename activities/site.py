"""What activities work with: the fleet, engine clients, a tracker, the run's resolved file."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from activities.reporting import ReportForwarder
from activities.storage import layout
from activities.storage.store import Store
from activities.wire.contract import InitWeightsUpdateGroup, MemoryTag, PauseMode
from configs.load import document_sha256, resolve_document
from configs.run import RunSpec
from models.errors import DigestMismatch
from models.ids import FenceToken, RunRef
from models.ports import FleetPort, Tracker
from models.publication import ChecksumKind, TensorMeta
from models.routing import RouterState, RoutingTable


class EngineControl(Protocol):
    """The control calls of ``activities.wire.client.EngineClient``."""

    async def health(self, *, timeout_s: float) -> bool:
        """Whether it generates; never while it is paused."""
        ...

    async def model_info(self) -> dict[str, Any]:
        """The served model and its ``weight_version``."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding."""
        ...

    async def resume(self) -> None:
        """Decode again."""
        ...

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        """Give memory back, paused; what is given back already stays so."""
        ...

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Take memory back, paused; weights are garbage until the next update."""
        ...

    async def update_weights_from_disk(self, path: str, version: int, timeout_s: float) -> None:
        """Load a folder and serve it as ``version``."""
        ...

    async def update_weights_from_tensor(
        self,
        handles: Mapping[str, str],
        engine_gpus: Sequence[str],
        version: int | None,
        timeout_s: float,
        *,
        flush_cache: bool = True,
    ) -> None:
        """Load what handles of another process's memory hold; serve it as ``version``, if given."""
        ...

    async def init_weights_update_group(
        self, group: InitWeightsUpdateGroup, *, timeout_s: float
    ) -> None:
        """Join a group whose rank 0 sends weights."""
        ...

    def adopt_weights_update_group(self, name: str) -> None:
        """Count on a group that the engine has joined at another client's request."""
        ...

    async def update_weights_from_distributed(
        self,
        group: str,
        tensors: Sequence[TensorMeta],
        version: int | None,
        timeout_s: float,
        *,
        flush_cache: bool = True,
    ) -> None:
        """Receive what rank 0 of the group broadcasts; serve it as ``version``, if given."""
        ...

    async def checksums(self, kind: ChecksumKind = "xxh3_64") -> dict[str, str]:
        """Tensor name -> 16 hex digits of its bytes."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


class RouterControl(Protocol):
    """The control calls of ``activities.wire.router_client.RouterClient``."""

    async def set_table(self, token: FenceToken, table: RoutingTable) -> None:
        """Route by exactly this table; a smaller token is refused with ``StaleFence``."""
        ...

    async def drain(self, token: FenceToken, engine: str, timeout_s: float) -> None:
        """Give ``engine`` no new group and return when it owes no call.

        Raises ``ServiceUnreachable`` when it still does after ``timeout_s`` seconds.
        """
        ...

    async def state(self) -> RouterState:
        """Every engine as the router sees it."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True)
class Site:
    """Where activities run; one per worker process."""

    fleet: FleetPort
    tracker: Tracker
    engine: Callable[[str], EngineControl]
    """A client for an engine's URL."""
    router: Callable[[str], RouterControl]
    """A client for a router's URL."""
    reports: ReportForwarder = field(default_factory=ReportForwarder)
    """Where this process stands with each run's serving reports."""


def store_of(run: RunRef) -> Store:
    """The run's output root."""
    return Store(run.root)


@lru_cache(maxsize=16)
def spec_of(run: RunRef) -> RunSpec:
    """The resolved run file of ``run``, checked against its digest. Blocks."""
    document = store_of(run).read_json(layout.RESOLVED_CONFIG)
    found = document_sha256(document)
    if found != run.spec_sha256:
        raise DigestMismatch(
            f"{run.root}/{layout.RESOLVED_CONFIG} has SHA-256 {found}, the run started with "
            f"{run.spec_sha256}"
        )
    return resolve_document(document, origin=layout.RESOLVED_CONFIG).spec
