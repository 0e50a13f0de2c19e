"""The router's own routes, their bodies, and the header that names a call's prompt group.

Everything else that the router answers is the engine contract.
"""

from typing import NamedTuple

from models.base import Frozen
from models.ids import FenceToken
from models.routing import RoutingTable

ROUTER_STATE = "/router/state"
ROUTER_TABLE = "/router/table"
ROUTER_DRAIN = "/router/drain"
ROUTER_RELEASE = "/router/release"

STALE = 409
"""Status for a token that a larger one outranks."""
STILL_OWES = 504
"""Status for an engine that was not drained in time."""

GROUP_HEADER = "x-perdure-group"


class TableOrder(Frozen):
    """``PUT /router/table``."""

    token: FenceToken
    table: RoutingTable


class DrainOrder(Frozen):
    """``POST /router/drain``; answered when the engine owes nothing, or at the time-out."""

    token: FenceToken
    engine: str
    timeout_s: float


class ReleaseOrder(Frozen):
    """``POST /router/release``: groups that ended before all their calls were answered."""

    groups: tuple[str, ...]


class GroupTag(NamedTuple):
    """Which prompt group a call belongs to, and how far its sender sees that group.

    The router forgets a group when ``expected`` calls of it were answered. A call that an engine
    handed back is sent again: then the sender expects one more.
    """

    group: str
    """Unique among all groups of a run; an attempt that is repeated is another group."""
    answered: int
    expected: int

    def header(self) -> str:
        """The value of ``GROUP_HEADER``."""
        return f"{self.group};{self.answered};{self.expected}"

    @classmethod
    def parse(cls, header: str) -> "GroupTag | None":
        """The tag in a header; None for one that is not of this form."""
        group, _, counts = header.partition(";")
        answered, _, expected = counts.partition(";")
        if not group or not answered.isdecimal() or not expected.isdecimal():
            return None
        return cls(group, int(answered), int(expected))
