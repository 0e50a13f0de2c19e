"""The error tree. Each leaf says whether a retry can help and what Temporal calls it.

PerdureError
├── ConfigurationError        fatal      the run file or its inputs are wrong; the user can fix it
│   └── OwnershipError        fatal      the output root belongs to another run or server
├── StaleFence                fatal      a newer epoch, update or attempt owns the component
├── ActorLost                 fatal*     a Ray actor died; the workflow rebuilds it (*not as is)
│   ├── TrainerLost
│   ├── ProducerLost
│   └── EngineLost
├── ContractViolation         fatal      an engine, a collection or a checkpoint broke its contract
│   ├── DigestMismatch                   bytes differ from what was recorded
│   ├── RequestGated                     a paused engine aborted a request at its gate
│   └── PolicyDisagreement               trainer and engine score the same tokens differently
├── NonFiniteLoss             fatal      the loss or a gradient is NaN or infinite
├── ServingFailureSustained   fatal      half of the group attempts failed for five minutes
├── StorageFull               fatal      no space left under the output root
├── RequestRefused            fatal      a run said no to pause, resume, checkpoint, stop or cancel
├── ServiceUnreachable        retryable  Temporal, Ray or an engine did not answer in time
└── GenerationFault           retryable  one group attempt failed for a known serving reason

Fatal means: Temporal does not retry the activity. ``ActorLost`` ends the activity at once and the
workflow decides on a rebuild. To add a leaf: subclass here, set ``retryable``, add a line above;
``activities/failures.py`` and the tests pick it up by walking the tree. Exceptions must stay
picklable: keep one positional message argument.
"""

from typing import ClassVar


class PerdureError(Exception):
    """Root of all errors that Perdure raises on purpose."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @classmethod
    def type_name(cls) -> str:
        """The string that Temporal stores as the failure's type."""
        return cls.__name__


class ConfigurationError(PerdureError, ValueError):
    """Anything the user can fix: a key, a value, a file, an address."""


class OwnershipError(ConfigurationError):
    """The output root is owned by another run, server or live process."""


class StaleFence(PerdureError):
    """A caller with an older token tried to mutate something that a newer one owns."""


class ActorLost(PerdureError):
    """A Ray actor is gone. Nobody retries the call: the workflow rebuilds the component."""


class TrainerLost(ActorLost):
    """The trainer died; its state since the last committed checkpoint is gone."""


class ProducerLost(ActorLost):
    """The producer died; it is rebuilt from the last collection's cursor and ledger."""


class EngineLost(ActorLost):
    """An engine died and could not be replaced within the deadline."""


class ContractViolation(PerdureError):
    """A peer answered something that the contract forbids."""


class DigestMismatch(ContractViolation):
    """Bytes on disk or in an engine differ from the recorded digest."""


class RequestGated(ContractViolation):
    """A paused engine aborted a request that waited at its gate.

    Legal during a publication only, where the request is sent again.
    """


class PolicyDisagreement(ContractViolation):
    """Mean |trainer - engine| log-prob gap above the configured limit."""


class NonFiniteLoss(PerdureError):
    """A loss, gradient or reward that is not a finite number."""


class ServingFailureSustained(PerdureError):
    """At least half of all group attempts failed for the whole window."""


class StorageFull(PerdureError):
    """A write failed because the device or quota is full."""


class RequestRefused(PerdureError):
    """A run refused what it was asked for, or does not run; the message is its reason."""


class ServiceUnreachable(PerdureError, ConnectionError):
    """A service did not answer within its deadline."""

    retryable = True


class GenerationFault(PerdureError):
    """One group attempt failed for a known serving reason; the group is requeued whole."""

    retryable = True

    def __init__(self, message: str, category: str = "transport") -> None:
        super().__init__(message)
        self.category = category

    def __reduce__(self) -> tuple[type["GenerationFault"], tuple[str, str]]:
        return (type(self), (self.message, self.category))


def all_errors(root: type[PerdureError] = PerdureError) -> list[type[PerdureError]]:
    """Every class of the tree below ``root``, the root included, depth first."""
    found = [root]
    for child in root.__subclasses__():
        found.extend(all_errors(child))
    return found


def fatal_type_names() -> list[str]:
    """Temporal type strings that must never be retried."""
    return sorted(error.type_name() for error in all_errors() if not error.retryable)
