"""Whatever a caller asks of a client, and whatever run file and prompts a producer is given: no
request leaves that ends an SGLang server.

A caller may die at any point. The next one has a client of its own, and knows nothing.
"""

import asyncio
import tempfile
from functools import partial
from itertools import permutations
from pathlib import Path

import httpx
import hypothesis.strategies as st
from hypothesis import event, given, settings
from pydantic import ValidationError

from activities.wire.client import EngineClient
from activities.wire.contract import (
    GenerateRequest,
    InitWeightsUpdateGroup,
    SamplingParams,
)
from configs.run import RunSpec
from models.errors import (
    ConfigurationError,
    ContractViolation,
    GenerationFault,
    ServiceUnreachable,
)
from models.ids import FenceToken
from models.publication import TensorMeta
from models.rollout import CollectRequest
from tests.support.brittle_engine import ALL_MEMORY, BrittleEngine
from tests.support.rollout_rig import RolloutRig

LIMIT_S = 20.0
TAGS = st.sets(st.sampled_from(sorted(ALL_MEMORY)), min_size=1)
VERSIONS = st.none() | st.integers(0, 3)
ENGINE_GPUS = ["GPU-0"]
NAMES = st.sampled_from(["", "a", "b"])


def step(call, /, **arguments):
    return st.fixed_dictionaries({"call": st.just(call), **arguments})


STEPS = st.one_of(
    step("requests arrive"),
    step("clients hang up"),
    step("the caller dies"),
    step("a call is cut off", after=st.integers(0, 3), done=st.booleans()),
    step("pause", mode=st.sampled_from(["abort", "retract", "in_place"])),
    step("pause", mode=st.just("abort")),
    step("resume"),
    step("disk", version=VERSIONS, flush_cache=st.booleans()),
    step(
        "tensor",
        version=VERSIONS,
        flush_cache=st.booleans(),
        gpus=st.sets(st.sampled_from(["GPU-0", "GPU-1", "GPU-7"])),
    ),
    step("init", name=NAMES),
    step("destroy", name=NAMES),
    step("broadcast", name=NAMES, version=VERSIONS, flush_cache=st.booleans()),
    step("release", tags=TAGS),
    step("take back", tags=TAGS),
    step("name", version=st.integers(0, 3)),
    step("generate"),
)


async def from_tensor(client, gpus, version, **options):
    """The trainer holds copies on ``gpus``; a handle of the brittle engine's is the GPU's name."""
    handles = {gpu: gpu for gpu in gpus}
    await client.update_weights_from_tensor(handles, ENGINE_GPUS, version, 5.0, **options)


async def init_group(client, name):
    await client.init_weights_update_group(
        InitWeightsUpdateGroup(
            master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name=name
        )
    )


async def broadcast(client, name, version, flush_cache):
    tensors = [TensorMeta("w", "bfloat16", (2, 2))]
    await client.update_weights_from_distributed(
        name, tensors, version, 5.0, flush_cache=flush_cache
    )


async def generate(client):
    """Nobody routes to an engine whose version names no policy."""
    if not (await client.model_info())["weight_version"].isdecimal():
        return
    request = GenerateRequest(
        rid="0" * 32, input_ids=[1], sampling_params=SamplingParams(max_new_tokens=2)
    )
    await client.generate(request, timeout_s=5.0)


CALLS = {
    "pause": EngineClient.pause,
    "resume": EngineClient.resume,
    "disk": partial(EngineClient.update_weights_from_disk, path="/w", timeout_s=5.0),
    "tensor": from_tensor,
    "init": init_group,
    "destroy": EngineClient.destroy_weights_update_group,
    "broadcast": broadcast,
    "release": EngineClient.release_memory,
    "take back": EngineClient.resume_memory,
    "name": EngineClient.set_weight_version,
    "generate": generate,
}


@settings(max_examples=1000, deadline=None)
@given(st.lists(STEPS, min_size=4, max_size=24))
def test_no_sequence_of_control_calls_ends_the_engine(steps):
    async def play():
        engine = BrittleEngine()
        client = connect(engine)
        for number, each in enumerate(steps):
            if each["call"] == "requests arrive":
                engine.arrive(1)
                continue
            if each["call"] == "clients hang up":
                engine.hang_up()
                continue
            if each["call"] == "the caller dies":
                await client.aclose()
                client = connect(engine)
                continue
            if each["call"] == "a call is cut off":
                engine.cut_in, engine.does_what_is_cut = each["after"], each["done"]
                continue
            arguments = {key: value for key, value in each.items() if key != "call"}
            try:
                await CALLS[each["call"]](client, **arguments)
            except ContractViolation:
                event(f"{each['call']} refused")
            except (ServiceUnreachable, GenerationFault):
                event(f"{each['call']} cut off")
            else:
                event(f"{each['call']} sent")
            assert engine.died is None, steps[: number + 1]
        await client.aclose()

    asyncio.run(play())


def connect(engine: BrittleEngine) -> EngineClient:
    return EngineClient(
        "http://engine",
        vocab_size=engine.vocab_size,
        context_length=engine.context_length,
        transport=httpx.MockTransport(engine.handle),
    )


FLOATS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 2)
COUNTS = st.integers(-2, 40) | st.integers()
TOKENS = st.lists(st.integers(0, 63) | st.integers(-2, 70), max_size=40)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": FLOATS,
        "top_p": FLOATS,
        "top_k": COUNTS,
        "max_new_tokens": COUNTS,
        "min_new_tokens": COUNTS,
        "stop_token_ids": st.none() | TOKENS,
        "ignore_eos": st.booleans(),
        "n": st.integers(-1, 3),
        "sampling_seed": st.none() | st.integers(),
    },
)


@settings(max_examples=400, deadline=None)
@given(TOKENS, SAMPLING, st.booleans(), st.integers(-2, 50), st.sampled_from(["", "ab", "0" * 32]))
def test_every_request_is_answered_or_not_sent(ids, sampling, slips, start, rid):
    """``slips``: an unknown key that came in behind the model's back, as ``model_copy`` lets it."""
    params = SamplingParams(**sampling)
    if slips:
        params = params.model_copy(update={"beam_width": 4})
    request = GenerateRequest(
        rid=rid, input_ids=ids, sampling_params=params, logprob_start_len=start
    )
    engine = BrittleEngine()

    async def send():
        client = connect(engine)
        try:
            await client.generate(request, timeout_s=5.0)
        except ContractViolation as error:
            return error.message
        finally:
            await client.aclose()
        return ""

    assert "answer to" not in asyncio.run(send()), "sent, and not understood"
    assert (engine.died, engine.refused) == (None, [])


PROMPTS = st.lists(st.integers(0, 63), min_size=1, max_size=12) | TOKENS
RUN_FILES = st.fixed_dictionaries(
    {
        "temperature": st.floats(0, 100),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.just(-1) | st.integers(1),
        "max_response_length": st.integers(1, 40),
    }
)


@settings(max_examples=60, deadline=None)
@given(RUN_FILES, st.integers(2, 60), st.integers(1, 3), st.lists(PROMPTS, min_size=2, max_size=4))
def test_no_run_file_and_no_prompt_ends_the_engine(inference, context, siblings, prompts):
    with tempfile.TemporaryDirectory() as folder:
        rig = RolloutRig(Path(folder))
        try:
            spec = rig.spec(
                inference={**inference, "server_concurrency": 4},
                core={"max_context_length": context},
                training={"rollout_batch_size": 2, "samples_per_prompt": siblings},
            )
        except ValidationError:
            event("the run file is refused")
            return
        # The engine is started with the context of the run file.
        engine = BrittleEngine(context_length=spec.core.max_context_length)
        engine.version = "0"
        rig.connect = lambda _: connect(engine)
        rig.prompts = lambda count, split="train": [
            rig.prompt(row, split).model_copy(update={"prompt_token_ids": tuple(ids)})
            for row, ids in enumerate(prompts)
        ]
        asyncio.run(collect(rig, spec))
    assert (engine.died, engine.refused) == (None, [])
    assert not any(one.startswith(other) for one, other in permutations(engine.rids, 2))


async def collect(rig: RolloutRig, spec: RunSpec) -> None:
    producer = rig.producer(spec)
    token = FenceToken(epoch=1, update=0, attempt=1)
    await producer.set_engines(token, ("http://engine",))
    request = CollectRequest(run=rig.run, epoch=1, update=0, policy_version=0, consumed_through=-1)
    try:
        async with asyncio.timeout(LIMIT_S):
            await producer.collect(token, request)
    except (ContractViolation, ConfigurationError) as error:
        event(type(error).__name__)
    else:
        event("collected")
    finally:
        await producer.close()
