"""The fence: the highest token wins, a revoked epoch never comes back."""

import threading

from models.errors import StaleFence
from models.ids import FenceToken


class FenceGuard:
    """Lives inside the component that mutates; call ``admit`` under the mutation's own lock.

    Tokens are compared as (epoch, update, attempt). An equal token is admitted again: the
    component answers a repeated call from its record.
    """

    def __init__(self, component: str) -> None:
        self._component = component
        self._highest: FenceToken | None = None
        self._revoked_through = -1
        self._lock = threading.Lock()

    @property
    def highest(self) -> FenceToken | None:
        """The highest token admitted so far."""
        return self._highest

    def admit(self, token: FenceToken) -> None:
        """Let ``token`` mutate, or raise ``StaleFence`` naming what outranks it."""
        with self._lock:
            if token.epoch <= self._revoked_through:
                raise StaleFence(
                    f"{self._component}: {token} refused, epochs up to "
                    f"{self._revoked_through} are revoked"
                )
            if self._highest is not None and token < self._highest:
                raise StaleFence(f"{self._component}: {token} refused, {self._highest} owns it")
            self._highest = token

    def revoke(self, epoch: int) -> None:
        """Refuse every token of ``epoch`` and below from now on."""
        with self._lock:
            self._revoked_through = max(self._revoked_through, epoch)
