"""What a check found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of a report; ``ok`` is None where there was nothing to judge."""

    check: str
    expected: str
    seen: str
    ok: bool | None
