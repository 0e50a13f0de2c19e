"""Fence tokens of activities: (epoch, update, attempt), growing in the order of the loop.

A component refuses every token below the highest it has seen, so of two calls that may follow one
another the later needs the larger token, retries included. Temporal restarts the attempt counter
with each activity; therefore the ``attempt`` of a token counts within a *place* in the loop::

    attempt = place * 1000 + Temporal's attempt

``update`` is the update being worked on, and for what follows an update the one that comes next.
With k finished updates the calls under ``update = k`` come in this order::

    collect(k) if sampled ahead, publish, checkpoint, evaluate, collect(k), optimize(k)
    export, once nothing is left to train

``prepare`` is the first call of its epoch and may rewind to any update, so it has ``update = 0``.

The collection sampled ahead of its update meets the producer before the publication of the update
in front of it does; a collection asked for in its turn meets it afterwards.
"""

from enum import IntEnum

from models.background import SnapshotRequest
from models.checkpoint import CheckpointRequest
from models.errors import ContractViolation
from models.evaluation import EvaluateRequest, ExportRequest
from models.ids import FenceToken
from models.publication import PublishRequest
from models.rollout import CollectRequest
from models.run import PrepareRequest
from models.update import OptimizeRequest

ATTEMPTS_PER_PLACE = 1000
"""More than any stage may try."""


class Place(IntEnum):
    """Order of the calls that share a token's ``update``."""

    PREPARE = 0
    COLLECT_AHEAD = 1
    PUBLISH = 2
    CHECKPOINT = 3
    EVALUATE = 4
    COLLECT = 5
    OPTIMIZE = 6
    EXPORT = 7


Fenced = (
    PrepareRequest
    | CollectRequest
    | PublishRequest
    | CheckpointRequest
    | EvaluateRequest
    | SnapshotRequest
    | OptimizeRequest
    | ExportRequest
)


def token_of(request: Fenced, attempt: int) -> FenceToken:
    """The token of Temporal's ``attempt`` (from 1) at ``request``."""
    if not 0 < attempt < ATTEMPTS_PER_PLACE:
        raise ContractViolation(
            f"activity attempt {attempt} is outside [1, {ATTEMPTS_PER_PLACE}): limit its retries"
        )
    update, place = _place(request)
    return FenceToken(
        epoch=request.epoch, update=update, attempt=place * ATTEMPTS_PER_PLACE + attempt
    )


def _place(request: Fenced) -> tuple[int, Place]:
    match request:
        case PrepareRequest():
            return 0, Place.PREPARE
        case CollectRequest():
            ahead = request.consumed_through < request.update - 1
            return request.update, Place.COLLECT_AHEAD if ahead else Place.COLLECT
        case PublishRequest():
            return request.update, Place.PUBLISH
        case CheckpointRequest():
            return request.update + 1, Place.CHECKPOINT
        case EvaluateRequest() | SnapshotRequest():
            return request.update, Place.EVALUATE
        case OptimizeRequest():
            return request.update, Place.OPTIMIZE
        case ExportRequest():
            return request.update, Place.EXPORT
