"""Which failures the workflow repairs by rebuilding, and how it names the others. Pure."""

from dataclasses import dataclass

from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    FailureError,
    TimeoutError,
)

from models.errors import ActorLost, StaleFence, all_errors

REBUILT = frozenset(
    (*(error.type_name() for error in all_errors(ActorLost)), StaleFence.type_name())
)
"""Failure types answered by a new epoch and a rebuild.

``StaleFence`` is among them: a zombie of this same run may have taken an epoch after us, and a
new claim decides who owns the root. Another owner shows there as ``OwnershipError``, which ends.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed stage in plain terms."""

    type: str
    message: str
    recoverable: bool

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


def classify(error: FailureError) -> Failure:
    """Name a failed stage by its root cause and say whether a rebuild can help."""
    stage = error.activity_type if isinstance(error, ActivityError) else ""
    cause = error.cause if isinstance(error, ActivityError) and error.cause else error
    if isinstance(cause, ApplicationError):
        kind = cause.type or "ApplicationError"
        return Failure(kind, cause.message, kind in REBUILT)
    if isinstance(cause, TimeoutError):
        limit = cause.type.name.lower().replace("_", " ") if cause.type else "unknown"
        return Failure("StageTimeout", f"{stage}: {limit} time-out, every attempt", True)
    return Failure(type(cause).__name__, f"{stage}: {cause}", recoverable=False)
