"""Errors at the activity boundary: Perdure's tree to Temporal's failures, and back.

Temporal stores a failure as a type string, a message and whether a retry may help; the tree in
``models.errors`` says all three.
"""

import errno
from types import TracebackType

from temporalio.exceptions import ApplicationError, FailureError

from models.errors import PerdureError, StorageFull, all_errors

DEFECT_ATTEMPTS = 5
"""Attempts after which an exception outside the tree is final: it is a defect, or something that a
few seconds do not heal."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class translated:
    """Leave the block with Temporal's form of whatever was raised in it.

    A ``PerdureError`` keeps its type and says itself whether a retry can help. A full device is
    ``StorageFull``. Any other exception is retried under its class name, a few times only.
    """

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, FailureError):
            return
        if isinstance(error, PerdureError):
            raise to_application_error(error) from error
        if isinstance(error, OSError) and error.errno in _FULL:
            raise to_application_error(StorageFull(_full_message(error))) from error
        if self._attempt >= DEFECT_ATTEMPTS:
            raise ApplicationError(
                f"{error} (attempt {self._attempt})", type=type(error).__name__, non_retryable=True
            ) from error


def to_application_error(error: PerdureError) -> ApplicationError:
    """The Temporal failure of ``error``: its class name as type, retryable as the class says."""
    return ApplicationError(
        error.message, type=error.type_name(), non_retryable=not error.retryable
    )


def from_application_error(error: ApplicationError) -> PerdureError | None:
    """The ``PerdureError`` that ``error`` was made of, or None for a type outside the tree."""
    for kind in all_errors():
        if kind.type_name() == error.type:
            return kind(error.message)
    return None


def _full_message(error: OSError) -> str:
    where = f" at {error.filename}" if error.filename else ""
    return (
        f"no space left{where}: {error.strerror}. Free space under output.root and start the run "
        "again; it continues from its newest committed checkpoint"
    )
