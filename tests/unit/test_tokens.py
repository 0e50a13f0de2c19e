"""Fence tokens grow along every order of calls that the loop can produce."""

from collections import defaultdict

import pytest

from activities.tokens import token_of
from models.checkpoint import CheckpointRequest
from models.errors import ContractViolation
from models.evaluation import EvaluateRequest, ExportRequest
from models.ids import FenceToken, RunRef
from models.publication import PublishRequest
from models.rollout import CollectionCounts, CollectRequest, RolloutCollection
from models.run import PrepareRequest
from models.update import OptimizeRequest

RUN = RunRef(run_id="train/x", root="/r", spec_sha256="0")


def collection(update: int) -> RolloutCollection:
    return RolloutCollection(
        update=update, epoch=1, uri="u", sha256="s",
        counts=CollectionCounts(groups=1, samples=1, prompt_tokens=1, response_tokens=1),
        reward_mean=0.0, min_version=0, max_version=0, seconds=1.0,
    )  # fmt: skip


class Calls:
    """Tokens as each component meets them; every call is retried up to ``attempts`` times."""

    def __init__(self, attempts: int, epoch: int = 1) -> None:
        self.attempts, self.epoch = attempts, epoch
        self.seen: dict[str, list[FenceToken]] = defaultdict(list)

    def _call(self, request: object, *components: str) -> None:
        for attempt in range(1, self.attempts + 1):
            for component in components:
                self.seen[component].append(token_of(request, attempt))  # type: ignore[arg-type]

    def prepare(self, update: int) -> None:
        request = PrepareRequest(run=RUN, epoch=self.epoch, next_update=update)
        self._call(request, "fleet", "trainer", "producer")

    def publish(self, done: int) -> None:
        request = PublishRequest(run=RUN, epoch=self.epoch, update=done, version=done)
        self._call(request, "fleet", "trainer", "producer")

    def collect(self, update: int, consumed: int) -> None:
        request = CollectRequest(
            run=RUN, epoch=self.epoch, update=update, policy_version=0, consumed_through=consumed
        )
        self._call(request, "fleet", "producer")

    def optimize(self, update: int) -> None:
        request = OptimizeRequest(
            run=RUN, epoch=self.epoch, update=update, collection=collection(update)
        )
        self._call(request, "trainer")

    def after_update(self, done: int) -> None:
        """Publication, checkpoint, evaluation."""
        self.publish(done)
        request = CheckpointRequest(run=RUN, epoch=self.epoch, update=done - 1, policy_version=done)
        self._call(request, "trainer")
        self.evaluate(done)

    def evaluate(self, done: int) -> None:
        request = EvaluateRequest(
            run=RUN, epoch=self.epoch, update=done, policy_version=done, phase="periodic"
        )
        self._call(request, "fleet", "producer")

    def export(self, done: int) -> None:
        request = ExportRequest(run=RUN, epoch=self.epoch, update=done, policy_version=done)
        self._call(request, "trainer")

    def check(self) -> None:
        for component, tokens in self.seen.items():
            assert tokens == sorted(tokens), component
            assert len(set(tokens)) == len(tokens), component


@pytest.mark.parametrize("attempts", [1, 3, 30])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(("prepared_for", "first"), [(0, 0), (7, 4)])
def test_tokens_grow_in_both_loops(
    overlapped: bool, attempts: int, prepared_for: int, first: int
) -> None:
    calls = Calls(attempts)
    calls.prepare(prepared_for)
    calls.publish(first)
    calls.evaluate(first)
    ahead = False
    for update in range(first, first + 4):
        if not ahead:
            calls.collect(update, consumed=update - 1)
        calls.optimize(update)
        ahead = overlapped
        if ahead:
            calls.collect(update + 1, consumed=update - 1)
        calls.after_update(update + 1)
    if ahead:
        # continued as new: the collection that was held is asked for again, in its turn
        calls.collect(first + 4, consumed=first + 3)
    calls.optimize(first + 4)
    calls.after_update(first + 5)
    calls.export(first + 5)
    calls.check()


def test_a_new_epoch_outranks_everything() -> None:
    late = token_of(ExportRequest(run=RUN, epoch=1, update=999, policy_version=9), 30)
    assert late < token_of(PrepareRequest(run=RUN, epoch=2, next_update=0), 1)


def test_an_attempt_never_reaches_the_next_place() -> None:
    request = EvaluateRequest(run=RUN, epoch=1, update=0, policy_version=0, phase="initial")
    with pytest.raises(ContractViolation, match="limit its retries"):
        token_of(request, 1000)
