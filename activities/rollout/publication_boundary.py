"""What a fully async producer does while engines take new weights."""

from typing import Literal

from activities.rollout.free_run import FreeRun, Hold
from activities.rollout.policy import ServedPolicy

PublicationMode = Literal["barrier", "refresh", "rolling"]


class PublicationBoundary:
    """Opens and closes the producer around a publication; the caller is fenced.

    ``barrier``: unfinished groups are cancelled and sampled again, finished ones stay.
    ``refresh``: no group begins; calls that engines hand back wait for the end.
    ``rolling``: nothing closes; each engine finishes what it has before it loads.
    """

    def __init__(self, mode: PublicationMode, policy: ServedPolicy, run: FreeRun) -> None:
        self._mode = mode
        self._policy = policy
        self._run = run
        self._interrupted = False

    async def begin(self, version: int) -> None:
        """Engines load ``version`` from now on; begun again, it finishes what is left to do.

        Raises:
            ContractViolation: ``version`` is older than what is published.
            ServiceUnreachable: cancelled groups do not end (barrier).
        """
        self._policy.begin(version, holds=self._mode != "rolling")
        if self._mode == "rolling":
            return
        self._run.hold(Hold.PUBLICATION)
        if self._mode == "barrier":
            self._interrupted = self._interrupted or self._run.is_running
            await self._run.stop()

    async def end(self, version: int) -> None:
        """Every engine serves ``version``; ended again, it does nothing.

        Raises:
            ContractViolation: another version was begun last.
            PerdureError: what ended the worker meanwhile (barrier).
        """
        self._policy.end(version)
        self._run.unhold(Hold.PUBLICATION)
        if self._interrupted:
            self._interrupted = False
            await self._run.ensure()

    def abandon(self) -> None:
        """Forget a publication that its epoch did not end; the next epoch publishes again."""
        self._interrupted = False
        self._policy.abandon()
        self._run.unhold(Hold.PUBLICATION)
