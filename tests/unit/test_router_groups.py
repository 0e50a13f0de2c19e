"""What the router reserves for prompt groups: never less than nothing, and nothing at the end."""

import asyncio
import random

import pytest

from activities.wire.router_contract import GroupTag
from models.routing import RoutedEngine
from workers.engines.router.groups import Groups
from workers.engines.router.target import Target
from workers.engines.router.upstream import Upstream


def target(name: str = "engine-0") -> Target:
    engine = RoutedEngine(name=name, url="http://127.0.0.1:1", incarnation=0, version=0, digest="d")
    return Target(engine, Upstream(engine.url))


def owes(each: Target) -> tuple[int, int, bool]:
    return each.load.reserved, each.groups, not each.settled.is_set()


async def test_a_group_is_reserved_whole_and_counts_down():
    groups, engine = Groups(expiry_s=10), target()
    tag = GroupTag("g", 0, 3)
    group = groups.give(tag, engine, 0.0)
    assert owes(engine) == (3, 1, True)
    for left in (2, 1, 0):
        groups.begin(group, tag, 1.0)
        groups.end(group, True, 1.0)
        assert engine.load.reserved == left
    assert owes(engine) == (0, 0, False)
    assert len(groups) == 0


async def test_a_call_that_ends_after_its_group_was_dropped_changes_nothing():
    groups, engine = Groups(expiry_s=10), target()
    tag = GroupTag("g", 0, 2)
    first = groups.give(tag, engine, 0.0)
    groups.begin(first, tag, 0.0)
    groups.release(("g", "never seen"))
    again = groups.give(tag, engine, 0.0)
    groups.end(first, True, 0.0)
    assert owes(engine) == (2, 1, True)
    groups.drop(first)
    assert groups.get(tag) is again


async def test_only_idle_groups_expire_and_the_oldest_makes_room():
    groups, engine = Groups(expiry_s=10, limit=3), target()
    tags = [GroupTag(name, 0, 1) for name in "abc"]
    made = [groups.give(tag, engine, float(now)) for now, tag in enumerate(tags)]
    groups.begin(made[0], tags[0], 0.0)
    groups.expire(10.5)
    assert [groups.get(tag) is not None for tag in tags] == [True, True, True]
    groups.expire(11.5)
    assert [groups.get(tag) is not None for tag in tags] == [True, False, True]
    assert groups.give(GroupTag("d", 0, 1), engine, 12.0) is not None
    assert groups.give(GroupTag("e", 0, 1), engine, 12.0) is not None
    assert groups.get(tags[2]) is None
    full = Groups(expiry_s=10, limit=1)
    busy = full.give(tags[0], engine, 0.0)
    full.begin(busy, tags[0], 0.0)
    assert full.give(tags[1], engine, 0.0) is None


@pytest.mark.parametrize("seed", range(20))
async def test_any_history_ends_with_nothing_reserved(seed: int):
    """Calls begin, end, fail and are sent again, groups are released and expire, in any order."""
    chance = random.Random(seed)
    groups, engines = Groups(expiry_s=5, limit=6), [target("engine-0"), target("engine-1")]
    open_calls = []
    for now in range(400):
        tag = GroupTag(f"g{chance.randrange(12)}", chance.randrange(3), chance.randrange(1, 9))
        step = chance.random()
        if step < 0.5:
            group = groups.get(tag) or groups.give(tag, chance.choice(engines), float(now))
            if group is not None:
                groups.begin(group, tag, float(now))
                open_calls.append(group)
        elif step < 0.85 and open_calls:
            group = open_calls.pop(chance.randrange(len(open_calls)))
            groups.end(group, chance.random() < 0.7, float(now))
        elif step < 0.9:
            groups.release((tag.group,))
        elif step < 0.93:
            groups.expire(float(now))
        elif step < 0.95:
            groups.drop_of(chance.choice(engines))
        assert all(each.load.reserved >= 0 and each.groups >= 0 for each in engines)
        assert sum(each.groups for each in engines) == len(groups) <= 6
    for group in open_calls:
        groups.end(group, chance.random() < 0.5, 400.0)
    groups.expire(1000.0)
    assert [owes(each) for each in engines] == [(0, 0, False)] * 2
    await asyncio.sleep(0)


def test_a_tag_survives_its_header_and_garbage_is_no_tag():
    tag = GroupTag("a1b2", 3, 8)
    assert GroupTag.parse(tag.header()) == tag
    for garbage in ("", "x", "x;1", "x;1;", "x;-1;2", "x;1;2;3", ";1;2", "x;a;b"):
        assert GroupTag.parse(garbage) is None
