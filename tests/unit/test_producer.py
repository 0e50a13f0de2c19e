"""Collections: idempotent, fenced, deterministic in the draw order, committed manifest last."""

import asyncio
import json

import pytest

from activities.rollout.attempt import sampling_seed
from activities.rollout.collection_file import read_collection
from activities.storage.layout import collection_manifest
from models.errors import ConfigurationError, ContractViolation, StaleFence
from models.ids import FenceToken
from models.prompt import DataState
from models.rollout import CollectionManifest, CollectRequest
from models.sample import TokenSpan, VerdictOutcome

ONE = ("http://one",)


def token(epoch=1, update=0, attempt=1):
    return FenceToken(epoch=epoch, update=update, attempt=attempt)


def request(rig, update=0, epoch=1, version=0, consumed=None):
    through = update - 1 if consumed is None else consumed
    return CollectRequest(
        run=rig.run, epoch=epoch, update=update, policy_version=version, consumed_through=through
    )


async def collect(rig, producer, update=0, epoch=1, **options):
    async with asyncio.timeout(20):
        return await producer.collect(token(epoch, update), request(rig, update, epoch, **options))


async def test_a_collection_holds_whole_groups_in_draw_order(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    collection = await collect(rig, producer)
    groups = read_collection(rig.store, collection)
    assert [group.group_index for group in groups] == [0, 1, 2, 3]
    assert [sample.sample_index for group in groups for sample in group.samples] == [*range(16)]
    assert collection.counts.samples == 16
    sample = groups[0].samples[0]
    assert bytes(sample.prompt_token_ids).decode().startswith("train")
    assert sample.response_token_ids[-1] == 0
    assert sample.text in ("y", "n")
    assert sample.reward == float(sample.text == "y")
    assert sample.spans == [TokenSpan(0, 0, 2)]
    for group in groups:
        mean = sum(group.rewards) / 4
        assert group.advantages == pytest.approx([reward - mean for reward in group.rewards])
    rewards = [reward for group in groups for reward in group.rewards]
    assert collection.reward_mean == pytest.approx(sum(rewards) / 16)
    assert collection.metrics["rollout/reward"] == collection.reward_mean
    assert (collection.min_version, collection.max_version) == (0, 0)


async def test_requests_carry_the_training_sampling_parameters(rig):
    spec = rig.spec(inference={"temperature": 0.7, "top_p": 0.9, "top_k": 5})
    producer = rig.producer(spec)
    await producer.set_engines(token(), ONE)
    await collect(rig, producer, version=0)
    body = rig.engine.bodies[0]
    params = body["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.7, 0.9, 5)
    assert params["max_new_tokens"] == 8
    assert params["stop_token_ids"] == [0]
    assert len({each["rid"] for each in rig.engine.bodies}) == 16
    assert all(len(each["rid"]) == 32 for each in rig.engine.bodies)
    seeds = {each["sampling_params"]["sampling_seed"] for each in rig.engine.bodies}
    assert seeds == {sampling_seed(17, "train", index, 0) for index in range(16)}


async def test_response_limit_shrinks_to_the_context(rig):
    producer = rig.producer(rig.spec(inference={"max_response_length": 60}))
    await producer.set_engines(token(), ONE)
    await collect(rig, producer)
    for body in rig.engine.bodies:
        limit = body["sampling_params"]["max_new_tokens"]
        assert limit == 64 - len(body["input_ids"])


async def test_the_same_update_again_joins_and_then_remembers(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    rig.engine.open.clear()
    first = asyncio.ensure_future(producer.collect(token(attempt=1), request(rig)))
    second = asyncio.ensure_future(producer.collect(token(attempt=2), request(rig)))
    await asyncio.sleep(0)
    rig.engine.open.set()
    results = await asyncio.wait_for(asyncio.gather(first, second), 10)
    third = await producer.collect(token(attempt=3), request(rig))
    assert results[0] == results[1] == third
    assert len(rig.engine.bodies) == 16


async def test_a_cancelled_caller_leaves_the_collection_running(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    rig.engine.open.clear()
    caller = asyncio.ensure_future(producer.collect(token(), request(rig)))
    while rig.engine.active < 16:
        await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    rig.engine.open.set()
    assert (await producer.collect(token(attempt=2), request(rig))).counts.samples == 16
    assert len(rig.engine.bodies) == 16


async def test_a_lower_token_and_a_revoked_epoch_are_refused(rig):
    producer = rig.producer()
    await producer.set_engines(token(epoch=2), ONE)
    await collect(rig, producer, update=1, epoch=2)
    with pytest.raises(StaleFence, match="epoch 1"):
        await producer.collect(token(epoch=1, update=2), request(rig, 2, 1))
    with pytest.raises(StaleFence):
        await producer.collect(token(epoch=2, update=0), request(rig, 0, 2))
    with pytest.raises(StaleFence):
        await producer.set_engines(token(epoch=1), ())
    producer.revoke(2)
    with pytest.raises(StaleFence, match="revoked"):
        await producer.collect(token(epoch=2, update=2), request(rig, 2, 2))


async def test_revoking_ends_a_running_collection_and_gives_its_prompts_back(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    rig.engine.open.clear()
    caller = asyncio.ensure_future(producer.collect(token(), request(rig)))
    while rig.engine.active < 16:
        await asyncio.sleep(0)
    producer.revoke(1)
    with pytest.raises(StaleFence, match="ended"):
        await asyncio.wait_for(caller, 10)
    assert rig.engine.active == 0
    assert rig.engine.cancelled == 16
    state = await producer.data_state(-1)
    assert [draw.group_index for draw in state.pending] == [0, 1, 2, 3]
    assert [draw.requeues for draw in state.pending] == [0, 0, 0, 0]


async def test_a_newer_epoch_takes_over_and_samples_the_same_prompts_again(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    first = await collect(rig, producer, epoch=1)
    rig.engine.open.clear()
    old = asyncio.ensure_future(producer.collect(token(1, 1), request(rig, 1, 1, consumed=-1)))
    while rig.engine.active < 16:
        await asyncio.sleep(0)
    rig.engine.open.set()
    again = await collect(rig, producer, epoch=2)
    with pytest.raises(StaleFence):
        await old
    assert again.uri != first.uri
    assert again.sha256 == first.sha256  # same prompts, same seeds, same bytes
    following = await collect(rig, producer, update=1, epoch=2)
    groups = read_collection(rig.store, following)
    assert [group.group_index for group in groups] == [4, 5, 6, 7]


async def test_the_manifest_says_where_a_new_producer_starts(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    await collect(rig, producer)
    second = await collect(rig, producer, update=1, consumed=-1)
    manifest = CollectionManifest.model_validate(rig.store.read_json(collection_manifest(1, 1)))
    assert manifest.collection == second
    assert manifest.data_after.pending == ()
    assert manifest.data_after.sample_group_index == 8
    assert manifest.data_after.train_sha256 == rig.store.sha256("prepared/data/train.jsonl")
    # nothing is trained yet: both collections are still owed
    state = await producer.data_state(-1)
    assert [draw.group_index for draw in state.pending] == [*range(8)]
    state = await producer.data_state(0)
    assert [draw.group_index for draw in state.pending] == [4, 5, 6, 7]
    heir = rig.producer(state=manifest.data_after)
    await heir.set_engines(token(2), ONE)
    third = await collect(rig, heir, update=2, epoch=2)
    groups = read_collection(rig.store, third)
    assert [group.group_index for group in groups] == [8, 9, 10, 11]


async def test_a_new_producer_adopts_a_committed_collection_of_its_epoch(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    committed = await collect(rig, producer)
    heir = rig.producer()
    assert await collect(rig, heir) == committed  # without any engine
    state = await heir.data_state(-1)
    assert [draw.group_index for draw in state.pending] == [0, 1, 2, 3]
    assert [draw.prepared_sample_id for draw in state.pending] == [
        group.prepared_sample_id for group in read_collection(rig.store, committed)
    ]
    assert state == await producer.data_state(-1)
    assert (await heir.data_state(0)).pending == ()


async def test_a_collection_without_manifest_does_not_exist(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    committed = await collect(rig, producer)
    rig.store.remove_tree(collection_manifest(0, 1))
    heir = rig.producer()
    await heir.set_engines(token(), ONE)
    asked = len(rig.engine.bodies)
    again = await collect(rig, heir)
    assert len(rig.engine.bodies) == asked + 16
    assert again.sha256 == committed.sha256


async def test_ties_are_replaced_in_draw_order_whatever_ends_first(rig):
    spec = rig.spec(core={"filter_zero_std_groups": True}, training={"samples_per_prompt": 2})

    def ties(group):
        seeds = [sampling_seed(17, "train", 2 * group + sibling, 0) for sibling in range(2)]
        return seeds[0] % 2 == seeds[1] % 2

    mixed = [group for group in range(64) if not ties(group)][:4]
    tied = [group for group in range(mixed[-1]) if ties(group)]
    assert tied, "the seed must exercise the filter"

    producer = rig.producer(spec)
    await producer.set_engines(token(), ONE)
    collection = await collect(rig, producer)
    groups = read_collection(rig.store, collection)
    assert [group.group_index for group in groups] == mixed
    assert sum(collection.counts.filtered_groups.values()) == len(tied)
    assert set(collection.counts.filtered_groups) <= {"zero_std_0.0", "zero_std_1.0"}
    assert collection.counts.mixed_reward_groups == 4
    state = await producer.data_state(-1)
    assert [draw.group_index for draw in state.pending] == sorted(mixed + tied)
    assert (await producer.data_state(0)).pending == ()
    name = f"rollout/dynamic_filter/drop_{next(iter(collection.counts.filtered_groups))}"
    assert collection.metrics[name] >= 1
    # dropped groups cost time, but what they hold is not delivered
    tokens = sum(len(sample.response_token_ids) for group in groups for sample in group.samples)
    rate = collection.metrics["rollout/response_tokens_per_second"]
    assert rate * collection.seconds == pytest.approx(tokens)


async def test_a_policy_that_always_ties_ends_its_collection(rig):
    spec = rig.spec(core={"filter_zero_std_groups": True}, training={"rollout_batch_size": 2})
    rig.engine.script = rig.engine.saying("n")
    producer = rig.producer(spec)
    await producer.set_engines(token(), ONE)
    collection = await collect(rig, producer)
    assert collection.counts.filtered_groups == {"zero_std_0.0": 32}
    assert collection.counts.mixed_reward_groups == 0
    groups = read_collection(rig.store, collection)
    assert [group.group_index for group in groups] == [32, 33]


async def test_a_truncated_response_scores_zero_when_asked(rig):
    rig.engine.script = rig.engine.saying("y", "length")
    spec = rig.spec(core={"reward_zero_truncated": True})
    producer = rig.producer(spec)
    await producer.set_engines(token(), ONE)
    collection = await collect(rig, producer)
    assert collection.reward_mean == 0.0
    assert collection.counts.truncated_samples == 16
    verdict = read_collection(rig.store, collection)[0].samples[0].verdicts[0]
    assert (verdict.outcome, verdict.score) == (VerdictOutcome.SCORE, 0.0)
    assert verdict.diagnostics == {"reward_gate": "truncated"}


async def test_without_the_rule_a_truncated_response_is_graded(rig):
    rig.engine.script = rig.engine.saying("y", "length")
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    collection = await collect(rig, producer)
    assert collection.reward_mean == 1.0
    assert collection.metrics["rollout/truncated_ratio"] == 1.0


async def test_an_end_token_in_the_last_allowed_place_is_no_truncation(rig):
    rig.engine.script = rig.engine.saying("y\0", "length")
    spec = rig.spec(core={"reward_zero_truncated": True}, inference={"max_response_length": 2})
    producer = rig.producer(spec)
    await producer.set_engines(token(), ONE)
    collection = await collect(rig, producer)
    assert collection.reward_mean == 1.0
    assert collection.counts.truncated_samples == 0


async def test_permits_limit_the_calls_of_all_engines(rig):
    producer = rig.producer(rig.spec(inference={"server_concurrency": 3}))
    await producer.set_engines(token(), tuple(rig.engines))
    await collect(rig, producer)
    both = list(rig.engines.values())
    assert sum(engine.max_active for engine in both) <= 6
    assert all(engine.bodies for engine in both)


async def test_siblings_share_an_engine(rig):
    producer = rig.producer()
    await producer.set_engines(token(), tuple(rig.engines))
    await collect(rig, producer)
    prompts = [
        {tuple(body["input_ids"]) for body in engine.bodies} for engine in rig.engines.values()
    ]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0]) == len(prompts[1]) == 2


async def test_progress_counts_samples(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    assert (await producer.progress()).stage == "idle"
    rig.engine.open.clear()
    caller = asyncio.ensure_future(producer.collect(token(), request(rig)))
    while rig.engine.active < 16:
        await asyncio.sleep(0)
    progress = await producer.progress()
    assert (progress.stage, progress.done, progress.total) == ("collect 0", 0, 16)
    rig.engine.open.set()
    await asyncio.wait_for(caller, 10)
    assert (await producer.progress()).stage == "idle"


async def test_a_collection_waits_for_engines(rig):
    producer = rig.producer()
    caller = asyncio.ensure_future(producer.collect(token(), request(rig)))
    await asyncio.sleep(0.05)
    assert not caller.done()
    await producer.set_engines(token(), ONE)
    assert (await asyncio.wait_for(caller, 10)).counts.groups == 4


async def test_another_training_file_is_refused(rig):
    state = DataState(train_sha256="a" * 64)
    with pytest.raises(ConfigurationError, match="a{64}.*" + "[0-9a-f]{64}"):
        rig.producer(state=state)


async def test_a_prompt_that_fills_the_context_is_refused(rig):
    producer = rig.producer(rig.spec(core={"max_context_length": 8}), num_prompts=2000)
    await producer.set_engines(token(), ONE)
    rig.engine.open.clear()  # most of "train0" ... "train1999" are nine tokens long
    with pytest.raises(ConfigurationError, match="max_context_length"):
        await collect(rig, producer)


async def test_serving_other_weights_is_fatal(rig):
    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    with pytest.raises(ContractViolation, match="weight_version is '0', expected 3"):
        await collect(rig, producer, version=3)
    assert rig.engine.active == 0


async def test_the_parquet_file_is_readable_without_perdure(rig):
    import pyarrow.parquet as pq

    producer = rig.producer()
    await producer.set_engines(token(), ONE)
    collection = await collect(rig, producer)
    table = pq.read_table(rig.store.local_path(collection.uri))
    assert table.num_rows == 16
    verdicts = table.column("verdicts").to_pylist()
    assert json.loads(verdicts[0][0]["diagnostics"]) == {}
