"""Which GPUs train, which serve: as the run's processes said, else as the plan lays them out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from activities.analysis.observations import Device
from activities.storage import layout
from activities.storage.store import Store

Role = Literal["trainer", "inference", "unused"]
ROLES: tuple[Role, ...] = ("trainer", "inference", "unused")
_ROLE_OF: Mapping[str, Role] = {"trainer": "trainer", "engine": "inference"}


@dataclass(frozen=True, slots=True)
class Allocation:
    """GPUs of a run; all 0 on CPUs."""

    trainer_gpus: int
    inference_gpus: int
    allocated_gpus: int
    engines: int
    nodes: int

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> "Allocation":
        """That of ``plan.json``."""
        allocation = plan["allocation"]
        gpus: Mapping[str, Any] = allocation.get("gpus") or {}
        nodes = gpus.get("nodes", ())
        return cls(
            trainer_gpus=sum(int(node["trainer_gpus"]) for node in nodes),
            inference_gpus=sum(int(node["rollout_gpus"]) for node in nodes),
            allocated_gpus=int(gpus.get("allocated_gpus", 0)),
            engines=int(allocation["engine_processes"]),
            nodes=len(nodes),
        )

    def gpus(self, role: Role) -> int:
        """How many GPUs have ``role``."""
        unused = max(0, self.allocated_gpus - self.trainer_gpus - self.inference_gpus)
        counts = {"trainer": self.trainer_gpus, "inference": self.inference_gpus}
        return counts.get(role, unused)


class Fleet:
    """The newest life of every process, from ``fleet.json``."""

    def __init__(self, store: Store, allocation: Allocation) -> None:
        exists = store.exists(layout.FLEET_JSON)
        self._rows: list[dict[str, Any]] = store.read_json(layout.FLEET_JSON) if exists else []
        self._allocation = allocation

    def engine_ranks(self) -> dict[str, int]:
        """Address -> rank of every engine."""
        engines = (row for row in self._rows if row["role"] == "engine" and row.get("url"))
        return {str(row["url"]): int(row["rank"]) for row in engines}

    def role(self, device: Device) -> Role | None:
        """What ``device`` does; None when neither a process nor the plan tells.

        A run on one node without processes that name their GPUs has those of the trainer first,
        then those of the engines.
        """
        on_host = [row for row in self._rows if row["host"] == device.host and row.get("gpus")]
        for row in on_host:
            if {str(device.index), device.uuid} & set(row["gpus"]) and row["role"] in _ROLE_OF:
                return _ROLE_OF[row["role"]]
        if on_host:
            return "unused"
        if self._allocation.nodes != 1:
            return None
        if device.index < self._allocation.trainer_gpus:
            return "trainer"
        policy = self._allocation.trainer_gpus + self._allocation.inference_gpus
        return "inference" if device.index < policy else "unused"
