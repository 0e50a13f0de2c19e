"""``fleet.json``: the newest life of every process of a run, kept under the output root.

Incarnations are counted here because nothing else survives the death of all processes.
"""

from activities.storage.store import Store
from models.ports import ActorStatus

FLEET_JSON = "fleet.json"


class FleetRecord:
    """Newest status of each (role, rank). All methods block; one writer at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[tuple[str, int], ActorStatus] | None = None

    def rows(self) -> tuple[ActorStatus, ...]:
        """Every process that the run ever had, in role and rank order."""
        return tuple(self._load()[key] for key in sorted(self._load()))

    def refresh(self) -> None:
        """Forget what was read: another worker may have written since."""
        self._rows = None

    def newest(self, role: str, rank: int) -> ActorStatus | None:
        """The newest life of a process; none when the run never had it."""
        return self._load().get((role, rank))

    def next_incarnation(self, role: str, rank: int) -> int:
        """0 for the first life, else one more than the newest."""
        last = self.newest(role, rank)
        return 0 if last is None else last.incarnation + 1

    def write(self, *statuses: ActorStatus) -> None:
        """Replace the rows of these processes on storage."""
        rows = self._load()
        rows.update({(status.role, status.rank): status for status in statuses})
        self._store.write_json(FLEET_JSON, [row.model_dump(mode="json") for row in self.rows()])

    def _load(self) -> dict[tuple[str, int], ActorStatus]:
        if self._rows is None:
            rows = self._store.read_json(FLEET_JSON) if self._store.exists(FLEET_JSON) else []
            statuses = [ActorStatus.model_validate(row) for row in rows]
            self._rows = {(status.role, status.rank): status for status in statuses}
        return self._rows
