"""Errors at the activity boundary: Perdure's tree to Temporal's failures, and back.

Temporal stores a failure as a type string, a message and whether a retry may help; the tree in
``models.errors`` says all three.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from temporalio.exceptions import ApplicationError

from models.errors import PerdureError, StorageFull, all_errors

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def translated() -> Iterator[None]:
    """Leave the block with Temporal's form of any ``PerdureError`` or full device.

    Other exceptions pass unchanged: they are defects and Temporal retries them a bounded number of
    times under their class name.
    """
    try:
        yield
    except PerdureError as error:
        raise to_application_error(error) from error
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise to_application_error(StorageFull(_full_message(error))) from error


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
