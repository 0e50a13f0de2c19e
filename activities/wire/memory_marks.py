"""Which memory an engine has given back: written into its weight version, as it tells nothing else.

An engine ends when it is asked to give back what it no longer has, or to take back what it has. A
caller may be a new process that knows nothing of an earlier one, so the engine itself must say.
Before memory moves the version becomes ``moving:...``, afterwards ``released:...`` or ``resumed``:
whoever finds ``moving`` cannot tell what the engine has, and replaces it. No mark is a policy
version, so an engine with a mark is never routed to, and needs its weights again.
"""

from collections.abc import Collection
from typing import NamedTuple, get_args

from activities.wire.contract import MemoryTag

RESUMED = "resumed"
"""It has all its memory; what the weights hold is unknown."""
_RELEASED = "released:"
_MOVING = "moving:"

TAGS: frozenset[str] = frozenset(get_args(MemoryTag))


class MemoryState(NamedTuple):
    """What a weight version says about an engine's memory."""

    released: frozenset[str]
    is_known: bool
    """False: a call that moved memory did not come to its end."""


def memory_state(weight_version: str) -> MemoryState:
    """What ``weight_version`` says. A version that is no mark means: nothing was given back."""
    if weight_version.startswith(_MOVING):
        return MemoryState(frozenset(), is_known=False)
    if not weight_version.startswith(_RELEASED):
        return MemoryState(frozenset(), is_known=True)
    released = frozenset(weight_version.removeprefix(_RELEASED).split(","))
    return MemoryState(released, is_known=released <= TAGS)


def moving_mark(tags: Collection[str]) -> str:
    """The version while ``tags`` move."""
    return _MOVING + ",".join(sorted(tags))


def settled_mark(released: Collection[str]) -> str:
    """The version while exactly ``released`` is given back."""
    return _RELEASED + ",".join(sorted(released)) if released else RESUMED
