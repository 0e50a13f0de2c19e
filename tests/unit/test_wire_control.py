"""Control calls of an engine client: what they send, and what they refuse to send."""

import json
from itertools import combinations

import httpx
import pytest

from activities.wire import health
from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, InitWeightsUpdateGroup
from activities.wire.memory_marks import memory_state, moving_mark, settled_mark
from models.errors import ContractViolation, ServiceUnreachable
from models.publication import TensorMeta
from tests.support.brittle_engine import ALL_MEMORY, BrittleEngine

TENSORS = [TensorMeta("a.weight", "bfloat16", (2, 3)), TensorMeta("b.weight", "float32", (4,))]
GROUP = InitWeightsUpdateGroup(
    master_address="127.0.0.1", master_port=29500, rank_offset=1, world_size=3, group_name="g-1"
)


class Wire:
    """A client of a brittle engine, and what it sent."""

    def __init__(self) -> None:
        self.engine = BrittleEngine(ranks=2)
        self.sent: list[tuple[str, dict]] = []
        self.client = self.another()

    def another(self) -> EngineClient:
        """A client of another process."""
        return EngineClient("http://engine:1", transport=httpx.MockTransport(self._handle))

    async def _handle(self, request):
        self.sent.append((request.url.path, json.loads(request.content or b"{}")))
        return await self.engine.handle(request)

    def bodies(self, path):
        return [body for each, body in self.sent if each == path]


@pytest.fixture
def wire():
    return Wire()


async def test_an_update_by_broadcast(wire):
    client = wire.client
    await client.init_weights_update_group(GROUP)
    await client.pause("abort")
    await client.update_weights_from_distributed("g-1", TENSORS[:1], None, 5.0, flush_cache=False)
    await client.update_weights_from_distributed("g-1", TENSORS[1:], 4, 5.0, load_format=None)
    await client.resume()
    await client.destroy_weights_update_group("g-1")
    assert wire.bodies("/init_weights_update_group") == [
        {
            "master_address": "127.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "g-1",
            "backend": "nccl",
        }
    ]
    common = {"group_name": "g-1", "abort_all_requests": False}
    assert wire.bodies("/update_weights_from_distributed") == [
        {
            **common,
            "names": ["a.weight"],
            "dtypes": ["bfloat16"],
            "shapes": [[2, 3]],
            "load_format": "flattened_bucket",
            "flush_cache": False,
        },
        {
            **common,
            "names": ["b.weight"],
            "dtypes": ["float32"],
            "shapes": [[4]],
            "flush_cache": True,
            "weight_version": "4",
        },
    ]
    assert (wire.engine.version, wire.engine.groups) == ("4", set())


async def test_an_update_by_tensor(wire):
    await wire.client.pause("abort")
    await wire.client.update_weights_from_tensor(
        {"GPU-2": "two", "GPU-1": "GPU-1", "GPU-0": "GPU-0"}, ["GPU-0", "GPU-1"], 7, 5.0
    )
    assert wire.bodies("/update_weights_from_tensor") == [
        {
            "serialized_named_tensors": ["GPU-0", "GPU-1"],
            "load_format": "flattened_bucket",
            "weight_version": "7",
            "flush_cache": True,
            "abort_all_requests": False,
        }
    ]


def tensors(handles, gpus):
    return lambda client: client.update_weights_from_tensor(handles, gpus, 1, 5.0)


def broadcast(group="g-1", sent=TENSORS):
    return lambda client: client.update_weights_from_distributed(group, sent, 1, 5.0)


def disk(**options):
    return lambda client: client.update_weights_from_disk("/w", 1, 5.0, **options)


REFUSED = [
    (None, disk(), "it was not paused by this client"),
    (None, disk(flush_cache=False), "it was not paused by this client"),
    ("retract", disk(), "paused with 'retract' and may hold requests"),
    ("in_place", disk(), "paused with 'in_place' and may hold requests"),
    ("in_place", lambda client: client.release_memory(["weights"]), "may hold requests"),
    (None, lambda client: client.release_memory(["weights"]), "it was not paused"),
    ("abort", tensors({"0": "x"}, ["0", "1"]), "it computes on 0, 1, the weights lie on 0"),
    ("abort", tensors({"0": "x"}, []), "it computes on nothing that is known"),
    ("abort", tensors({}, ["0"]), "the weights lie on nothing that is known"),
    ("abort", broadcast(), "this client initialized no group 'g-1'"),
    (None, lambda client: client.abort(""), "abort of '' is not sent"),
    (None, lambda client: client.abort("ab"), "may begin other ids"),
    (
        None,
        lambda client: client.generate(
            GenerateRequest(rid="0" * 32, input_ids=[1]), timeout_s=1
        ),
        "told no vocabulary size or context length",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "call", [disk(), lambda client: client.release_memory(["weights"])], ids=["update", "release"]
)
async def test_an_engine_comes_to_rest_before_what_needs_it_idle(wire, call):
    """Its scheduler may still compute for clients that hung up when a pause is answered."""
    wire.engine.arrive(2)
    wire.engine.hang_up()
    await wire.client.pause("abort")
    await call(wire.client)
    assert wire.engine.died is None
    assert len(wire.bodies("/flush_cache")) == 1


async def test_an_engine_comes_to_rest_once_in_a_pause(wire):
    for pauses in (1, 2):
        wire.engine.arrive(1)
        wire.engine.hang_up()
        await wire.client.pause("abort")
        await disk()(wire.client)
        await disk()(wire.client)
        assert (wire.engine.died, len(wire.bodies("/flush_cache"))) == (None, pauses)
        await wire.client.resume()


async def test_an_engine_without_its_memory_is_at_rest_already(wire):
    wire.engine.arrive(1)
    wire.engine.hang_up()
    await wire.client.pause("abort")
    await wire.client.release_memory(["kv_cache", "weights"])
    client = wire.another()
    await client.pause("abort")
    await client.resume_memory(["kv_cache", "weights"])
    await disk()(client)
    assert (wire.engine.died, len(wire.bodies("/flush_cache"))) == (None, 1)
    await client.pause("retract")
    await client.pause("abort")
    await disk()(client)
    assert len(wire.bodies("/flush_cache")) == 2


@pytest.mark.parametrize(("mode", "call", "message"), REFUSED)
async def test_what_would_end_the_engine_is_not_sent(wire, mode, call, message):
    if mode is not None:
        await wire.client.pause(mode)
    before = [path for path, _ in wire.sent if path != "/server_info"]
    with pytest.raises(ContractViolation, match=message):
        await call(wire.client)
    assert [path for path, _ in wire.sent if path != "/server_info"] == before


@pytest.mark.parametrize("sent", [[], [*TENSORS, TENSORS[0]]])
async def test_a_broadcast_of_nothing_or_of_one_twice_is_not_sent(wire, sent):
    await wire.client.init_weights_update_group(GROUP)
    await wire.client.pause("abort")
    with pytest.raises(ContractViolation, match="no tensor, or one is named twice"):
        await broadcast(sent=sent)(wire.client)


async def test_a_group_that_did_not_come_about_is_not_used_and_its_name_never_again(wire):
    wire.engine.cut_in, wire.engine.does_what_is_cut = 0, False
    with pytest.raises(ServiceUnreachable):
        await wire.client.init_weights_update_group(GROUP)
    await wire.client.pause("abort")
    with pytest.raises(ContractViolation, match="initialized no group 'g-1'"):
        await broadcast()(wire.client)
    with pytest.raises(ContractViolation, match="the group name 'g-1' is used up"):
        await wire.client.init_weights_update_group(GROUP)


async def test_a_pause_that_aborts_makes_a_retracting_one_harmless(wire):
    await wire.client.pause("retract")
    await wire.client.pause("abort")
    await disk()(wire.client)
    assert wire.engine.version == "1"


async def test_memory_is_given_back_and_taken_back_whoever_asks(wire):
    """Release, and a process that knows nothing publishes: weights, then the cache, then on."""
    await wire.client.pause("abort")
    await wire.client.release_memory(["kv_cache", "weights"])
    assert wire.engine.version == "released:kv_cache,weights"
    await wire.client.release_memory(["kv_cache", "weights"])  # a repeated call moves nothing
    assert len(wire.bodies("/release_memory_occupation")) == 1

    client = wire.another()
    await client.pause("abort")
    with pytest.raises(ContractViolation, match="it gave back kv_cache, weights: resume_memory"):
        await disk()(client)
    await client.resume_memory(["weights"])
    assert wire.engine.version == "released:kv_cache"
    with pytest.raises(ContractViolation, match="it gave back kv_cache"):
        await disk()(client)  # the version would hide it
    with pytest.raises(ContractViolation, match="continue_generation is not sent"):
        await client.resume()
    await client.update_weights_from_disk("/w", None, 5.0)
    await client.resume_memory(["kv_cache"])
    assert wire.engine.version == "resumed"
    await client.set_weight_version(9)
    await client.resume()
    assert (wire.engine.version, wire.engine.died) == ("9", None)
    assert wire.bodies("/resume_memory_occupation") == [
        {"tags": ["weights"]},
        {"tags": ["kv_cache"]},
    ]
    assert not any(body["abort_all_requests"] for body in wire.bodies("/update_weight_version"))


@pytest.mark.parametrize("done", [True, False])
async def test_nobody_guesses_what_a_call_that_was_cut_off_has_moved(wire, done):
    await wire.client.pause("abort")
    wire.engine.cut_in, wire.engine.does_what_is_cut = 4, done
    with pytest.raises(ServiceUnreachable, match="release_memory_occupation"):
        await wire.client.release_memory(["weights"])
    for client in (wire.client, wire.another()):
        await client.pause("abort")
        for call in (
            lambda client: client.release_memory(["weights"]),
            lambda client: client.resume_memory(["weights"]),
            lambda client: client.resume(),
            disk(),
        ):
            with pytest.raises(ContractViolation, match="nobody knows which memory it has"):
                await call(client)


async def test_a_server_without_the_memory_saver_gives_nothing_back(wire):
    info = wire.engine._routes["/server_info"]
    wire.engine._routes["/server_info"] = lambda _: info(_) | {"enable_memory_saver": False}
    await wire.client.pause("abort")
    with pytest.raises(ContractViolation, match="without --enable-memory-saver"):
        await wire.client.release_memory(["weights"])


def test_marks_say_what_they_were_made_of():
    for count in range(4):
        for tags in map(frozenset, combinations(sorted(ALL_MEMORY), count)):
            assert memory_state(settled_mark(tags)) == (tags, True)
            assert not memory_state(moving_mark(tags)).is_known
            assert not settled_mark(tags).isdecimal()
    assert memory_state("default") == memory_state("12") == memory_state("") == (frozenset(), True)
    assert not memory_state("released:weights,unheard_of").is_known


class Patient:
    def __init__(self, *looks):
        self.looks = list(looks)

    async def health(self, *, timeout_s):
        return self.looks.pop(0)


async def test_three_failed_looks_in_a_row_and_no_fewer(monkeypatch):
    monkeypatch.setattr(health, "INTERVAL_S", 0.0)
    engine = Patient(False, False, True, False, False, True, False, False, False, True)
    await health.until_hung(engine)
    assert engine.looks == [True]


def test_looks_are_counted_for_each_process():
    looks = health.FailedLooks(2)
    assert not looks.note("a", healthy=False)
    assert not looks.note("b", healthy=False)
    looks.keep({"b"})
    assert not looks.note("a", healthy=False)
    assert looks.note("b", healthy=False)
