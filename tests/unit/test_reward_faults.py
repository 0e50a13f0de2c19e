"""A fault of a reward service is no serving fault: it ends the run instead of being retried."""

import asyncio

import httpx
import pytest

from activities.storage.layout import ROLLOUT_ERRORS
from activities.verifiers.registry import VerifierSet
from models.errors import ContractViolation, GenerationFault
from models.ids import FenceToken
from models.rollout import CollectRequest

ONE = ("http://one",)
TOKEN = FenceToken(epoch=1, update=0, attempt=1)
ASKED = httpx.Request("POST", "http://judge/generate")

FAULTS = [
    httpx.ReadTimeout("no verdict", request=ASKED),
    httpx.ConnectError("refused", request=ASKED),
    httpx.HTTPStatusError(
        "busy",
        request=ASKED,
        response=httpx.Response(503, json={"message": "The request queue is full."}),
    ),
    TimeoutError("no verdict"),
    GenerationFault("the judge's queue is full", "overload"),
]


class Raising:
    """A verifier whose service fails."""

    def __init__(self, error):
        self._error = error

    async def verify(self, prompt, target, text):
        raise self._error

    async def aclose(self):
        pass


@pytest.mark.parametrize("fully_async", [False, True])
@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
async def test_a_reward_fault_is_fatal_and_not_counted(rig, error, fully_async):
    spec = rig.async_spec() if fully_async else rig.spec()
    producer = rig.producer(spec, verifiers=VerifierSet({"exact": lambda: Raising(error)}))
    await producer.set_engines(TOKEN, ONE)
    if fully_async:
        await producer.begin_publication(TOKEN, 0)
        await producer.end_publication(TOKEN, 0)
    request = CollectRequest(run=rig.run, epoch=1, update=0, policy_version=0, consumed_through=-1)
    async with asyncio.timeout(20):
        with pytest.raises(ContractViolation) as caught:
            await producer.collect(TOKEN, request)
    assert str(error) in caught.value.message
    row = rig.store.read_jsonl(ROLLOUT_ERRORS).rows[-1]
    assert row["errors/fatal"] == 1
    assert row["fatal"] == f"ContractViolation: {caught.value.message}"[: len(row["fatal"])]
    assert row["errors/requeued_groups"] == 0
    state = await producer.data_state(-1)
    assert len(state.pending) == state.sample_group_index  # every prompt is owed
