"""Which fleets the reaper ends, with Ray left out."""

import asyncio
from pathlib import Path

import pytest

from models.ids import RunRef
from workers.fleet import RayFleet, ending


class Cluster:
    """Runs that have actors, and what was torn down."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = {
            name: RunRef(run_id=name, root=str(folder / name), spec_sha256="s")
            for name in ("train/a", "train/b")
        }
        self.ended: list[str] = []
        self.broken: set[str] = set()

        async def runs_with_actors(cluster: object) -> set[str]:
            return set(self.runs)

        async def find_run(cluster: object, run_id: str) -> RunRef:
            return self.runs[run_id]

        async def teardown(fleet: object, engines: object) -> None:
            run_id = fleet.run.run_id  # type: ignore[attr-defined]
            if run_id in self.broken:
                raise PermissionError(13, "Permission denied")
            self.ended.append(run_id)

        monkeypatch.setattr(ending, "runs_with_actors", runs_with_actors)
        monkeypatch.setattr(ending, "find_run", find_run)
        monkeypatch.setattr(ending, "teardown", teardown)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


async def closed(run_id: str) -> bool:
    return False


async def test_a_run_that_was_started_again_keeps_its_fleet(cluster: Cluster) -> None:
    """Closed when first looked at, running again once its preparation has left the lock."""
    fleet = RayFleet("127.0.0.1:1")
    running = {"train/b"}

    async def is_open(run_id: str) -> bool:
        return run_id in running

    preparing = fleet._run(cluster.runs["train/a"]).fleet.lock
    async with preparing:
        reaping = asyncio.create_task(fleet.reap(is_open))
        for _ in range(20):
            await asyncio.sleep(0)
        running.add("train/a")
    assert await asyncio.wait_for(reaping, 10) == ()
    assert cluster.ended == []


async def test_a_fleet_that_cannot_be_ended_does_not_keep_the_others(cluster: Cluster) -> None:
    cluster.broken.add("train/a")
    assert await RayFleet("127.0.0.1:1").reap(closed) == ("train/b",)
    assert cluster.ended == ["train/b"]
