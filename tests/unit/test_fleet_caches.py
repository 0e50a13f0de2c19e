"""What a completed run compiled: published by all at once, and never a reason to fail."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from activities.storage.store import Store
from models.errors import EngineLost, ServiceUnreachable
from workers.fleet.caches import MARGIN_S, publish_caches


class Actor:
    def __init__(self, name: str, answer: Any, meet: asyncio.Barrier) -> None:
        self.name, self.answer, self.meet = name, answer, meet

    async def call(self, method: str, *, timeout_s: float, follow: bool) -> Any:
        assert (method, timeout_s, follow) == ("publish_cache", 240 + MARGIN_S, False)
        await asyncio.wait_for(self.meet.wait(), 5)  # nobody waits for another's end
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_results_of_all_are_recorded_and_losses_pass(tmp_path: Path) -> None:
    meet, store = asyncio.Barrier(4), Store(tmp_path)
    answers = {
        "trainer-0": {"work": "publish", "outcome": "published"},
        "engine-0": ServiceUnreachable("no answer within 250 s"),
        "engine-1": EngineLost("it died"),
        "engine-2": None,
    }

    async def spec() -> Any:
        return SimpleNamespace(inference=SimpleNamespace(num_engines=3))

    def actor(role: str, rank: int) -> Actor:
        name = f"{role}-{rank}"
        return Actor(name, answers[name], meet)

    fleet: Any = SimpleNamespace(spec=spec, actor=actor, store=store)
    await publish_caches(fleet)

    rows = store.read_jsonl("checkpoints/compiler_cache.jsonl").rows
    assert [(row["actor"], row["outcome"], row.get("reason")) for row in rows] == [
        ("trainer-0", "published", None),
        ("engine-0", "failed", "no answer within 250 s"),
        ("engine-1", "failed", "it died"),
    ]


async def test_a_root_that_cannot_be_read_or_written_fails_nothing() -> None:
    async def spec() -> Any:
        raise ServiceUnreachable("the store is away")

    class Away:
        def append_jsonl(self, _file: str, _row: Any) -> None:
            raise ServiceUnreachable("the store is away")

    meet = asyncio.Barrier(1)
    actor = Actor("trainer-0", {"outcome": "published"}, meet)
    fleet: Any = SimpleNamespace(spec=spec, actor=lambda *_: actor, store=Away())
    await publish_caches(fleet)
