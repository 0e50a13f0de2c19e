"""Which prompt group went to which engine: bounded, and nothing is held for a group for ever.

A group ends when all its expected calls were answered, when its sender releases it or hangs up,
when its engine is gone, when an epoch begins, and at last by its age: a sender that died with
none of its calls open tells nobody.
"""

from activities.wire.router_contract import GroupTag
from workers.engines.router.target import Group, Target

MAX_GROUPS = 65_536
"""Far above what producers have unfinished; a group beyond it is routed call by call."""


class Groups:
    """Groups by key, least recently used first. ``expiry_s``: longest time without a call."""

    def __init__(self, expiry_s: float, limit: int = MAX_GROUPS) -> None:
        self._expiry_s = expiry_s
        self._limit = limit
        self._groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, tag: GroupTag) -> Group | None:
        """The group of ``tag``, if it was given to an engine."""
        return self._groups.get(tag.group)

    def give(self, tag: GroupTag, target: Target, now: float) -> Group | None:
        """Give a new group to ``target``; None when the table is full of groups with open calls."""
        if len(self._groups) >= self._limit and not self._make_room():
            return None
        group = Group(tag.group, target, tag.answered, max(tag.expected, tag.answered + 1))
        self._groups[tag.group] = group
        target.load.reserved += group.owed
        target.groups += 1
        group.touched = now
        target.changed()
        return group

    def begin(self, group: Group, tag: GroupTag, now: float) -> None:
        """A call of ``group`` is sent; its tag may expect more calls than those before."""
        more = max(group.expected, tag.expected)
        group.target.load.reserved -= group.owed
        group.expected = more
        group.target.load.reserved += group.owed
        group.active += 1
        self._touch(group, now)

    def end(self, group: Group, answered: bool, now: float) -> None:
        """A call of ``group`` is over; without an answer its sender says how the group goes on."""
        group.active -= 1
        if self._groups.get(group.key) is not group:
            return
        if answered:
            group.target.load.reserved -= 1 if group.owed else 0
            group.answered += 1
        if not group.owed and not group.active:
            self.drop(group)
        else:
            self._touch(group, now)

    def drop(self, group: Group) -> None:
        """Forget ``group``; its open calls go on."""
        if self._groups.get(group.key) is not group:
            return
        del self._groups[group.key]
        group.target.load.reserved -= group.owed
        group.target.groups -= 1
        group.target.changed()

    def release(self, keys: tuple[str, ...]) -> None:
        """Forget these groups; unknown ones have ended already."""
        for key in keys:
            if (group := self._groups.get(key)) is not None:
                self.drop(group)

    def drop_of(self, target: Target) -> None:
        """Forget every group of an engine that is gone."""
        for group in [each for each in self._groups.values() if each.target is target]:
            self.drop(group)

    def clear(self) -> None:
        """Forget every group: their senders are not listened to any more."""
        for group in tuple(self._groups.values()):
            self.drop(group)

    def expire(self, now: float) -> None:
        """Forget groups that had no open call for too long."""
        oldest = now - self._expiry_s
        for group in tuple(self._groups.values()):
            if group.touched > oldest:
                return
            if not group.active:
                self.drop(group)

    def _touch(self, group: Group, now: float) -> None:
        group.touched = now
        # A dict keeps the order of insertion: the newest goes to its end.
        self._groups[group.key] = self._groups.pop(group.key)

    def _make_room(self) -> bool:
        """Forget the idle group that was used least recently; False when none is idle."""
        idle = next((group for group in self._groups.values() if not group.active), None)
        if idle is not None:
            self.drop(idle)
        return idle is not None
