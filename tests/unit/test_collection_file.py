"""Collections survive the file: every field, bit for bit."""

import math
from dataclasses import asdict, replace

import hypothesis.strategies as st
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from activities.rollout.collection_file import read_collection, read_samples, write_collection
from activities.storage.store import Store
from models.errors import ContractViolation, DigestMismatch
from models.rollout import CollectionCounts, RolloutCollection
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan, Verdict, VerdictOutcome

tokens = st.integers(0, 2**31 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def verdicts(draw):
    outcome = draw(st.sampled_from(VerdictOutcome))
    score = math.nan if outcome is VerdictOutcome.ERROR else draw(st.floats(0, 1))
    diagnostics = draw(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)))
    return Verdict(
        draw(st.text(max_size=8)), outcome, score, draw(finite), draw(st.text()), diagnostics
    )


@st.composite
def samples(draw, group_index, sample_index):
    length = draw(st.integers(1, 6))
    cut = draw(st.integers(0, length - 1))
    spans = [TokenSpan(3, cut, length)]
    if cut:
        spans.insert(0, TokenSpan(2, 0, cut))
    graded = draw(st.lists(verdicts(), max_size=2))
    return Sample(
        sample_index=sample_index,
        group_index=group_index,
        prompt_token_ids=draw(st.lists(tokens, min_size=1, max_size=5)),
        response_token_ids=draw(st.lists(tokens, min_size=length, max_size=length)),
        logprobs=draw(st.lists(finite, min_size=length, max_size=length)),
        spans=spans,
        finish_reason=draw(st.sampled_from(FinishReason)),
        text=draw(st.text()),
        reward=draw(st.just(math.nan) | finite),
        verdicts=graded,
        routed_experts=draw(st.none() | st.binary(min_size=1, max_size=40)),
    )


@st.composite
def collections(draw):
    size = draw(st.integers(1, 3))
    found = []
    for position, group_index in enumerate(
        sorted(draw(st.sets(st.integers(0, 10**9), min_size=1, max_size=3)))
    ):
        members = [draw(samples(group_index, position * size + each)) for each in range(size)]
        advantages = draw(st.lists(finite, min_size=size, max_size=size) | st.just([]))
        found.append(
            SampleGroup(group_index, draw(st.text()), draw(st.integers(0, 9)), members, advantages)
        )
    return found


def comparable(value):
    """``value`` as plain lists and dicts, NaN (which differs from itself) replaced by a word."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def plain(groups):
    return comparable([asdict(group) for group in groups])


@settings(deadline=None, max_examples=25)
@given(groups=collections())
def test_what_is_written_is_read_back(groups, tmp_path_factory):
    store = Store(str(tmp_path_factory.mktemp("root")))
    write_collection(store, "rollouts/x.parquet", groups)
    assert plain(read_samples(store, "rollouts/x.parquet")) == plain(groups)


def small_group():
    sample = Sample(
        sample_index=4,
        group_index=2,
        prompt_token_ids=[1, 2],
        response_token_ids=[3, 0],
        logprobs=[-0.25, -1.5],
        spans=[TokenSpan(7, 0, 2)],
        finish_reason=FinishReason.STOP,
        text="c",
        reward=0.0,
        verdicts=[Verdict("exact", VerdictOutcome.INVALID, 0.0)],
    )
    other = replace(sample, sample_index=5, reward=1.0)
    return SampleGroup(2, "task:train:9", 1, [sample, other], [-0.5, 0.5])


def committed(store, uri, group=None):
    sha256 = write_collection(store, uri, [group or small_group()])
    return RolloutCollection(
        update=0,
        epoch=1,
        uri=uri,
        sha256=sha256,
        counts=CollectionCounts(groups=1, samples=2, prompt_tokens=4, response_tokens=4),
        reward_mean=0.5,
        min_version=7,
        max_version=7,
        seconds=0.1,
    )


def test_a_collection_is_checked_against_its_digest(tmp_path):
    store = Store(str(tmp_path))
    collection = committed(store, "rollouts/a.parquet")
    assert collection.sha256 == store.sha256("rollouts/a.parquet")
    assert read_collection(store, collection) == [small_group()]
    changed = small_group()
    changed.samples[0].reward = 1.0
    write_collection(store, "rollouts/a.parquet", [changed])
    with pytest.raises(DigestMismatch, match=r"rollouts/a\.parquet"):
        read_collection(store, collection)


def test_equal_groups_make_equal_bytes(tmp_path):
    store = Store(str(tmp_path))
    assert committed(store, "a").sha256 == committed(store, "b").sha256


def test_files_of_any_length_are_read_back_in_order(tmp_path):
    """Rows are converted in parts, so a group may lie across two of them."""
    store = Store(str(tmp_path))
    group = small_group()
    three = [replace(group.samples[0], sample_index=index) for index in range(3)]
    for count in (0, 1, 21, 22, 64):
        groups = [
            replace(
                group,
                group_index=index,
                samples=[replace(each, group_index=index) for each in three],
                advantages=[0.0, 1.0, -1.0],
            )
            for index in range(count)
        ]
        write_collection(store, "a.parquet", groups)
        assert read_samples(store, "a.parquet") == groups


def routed_group():
    """Two layers, top-1, for two prompt and two response tokens; its second sample has none."""
    group = small_group()
    group.samples[0].routed_experts = bytes(range(24))
    group.samples[0].spans = [TokenSpan(6, 0, 1), TokenSpan(7, 1, 2)]
    return group


def test_routes_and_mixed_spans_are_read_back(tmp_path):
    store = Store(str(tmp_path))
    collection = committed(store, "a.parquet", routed_group())
    assert read_collection(store, collection) == [routed_group()]
    assert committed(store, "b.parquet", routed_group()).sha256 == collection.sha256


def test_a_file_without_routes_has_no_column_of_them(tmp_path):
    store = Store(str(tmp_path))
    committed(store, "dense.parquet")
    committed(store, "routed.parquet", routed_group())
    dense, routed = (
        pq.read_schema(tmp_path / name).names for name in ("dense.parquet", "routed.parquet")
    )
    assert "routed_experts" not in dense
    assert routed == [*dense, "routed_experts"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spans": []}, "spans: there is none"),
        ({"spans": [TokenSpan(7, 0, 1)]}, "spans end at 1, the response has 2 tokens"),
        ({"spans": [TokenSpan(7, 0, 1), TokenSpan(6, 1, 2)]}, "above the last forward's 6"),
        ({"logprobs": [-0.25, math.nan]}, r"logprobs\[1\] is nan"),
        ({"logprobs": [-0.25]}, "logprobs has 1 values for 2 response tokens"),
        ({"routed_experts": bytes(10)}, "routed_experts has 10 bytes"),
    ],
)
def test_what_cannot_be_trained_on_is_not_read_back(tmp_path, changes, message):
    store = Store(str(tmp_path))
    group = small_group()
    group.samples[1] = replace(group.samples[1], **changes)
    collection = committed(store, "a.parquet", group)
    with pytest.raises(ContractViolation, match=f"prompt group 2, sample 5: .*{message}"):
        read_collection(store, collection)
    assert len(read_samples(store, "a.parquet")) == 1  # a tool for people shows it


def test_people_can_read_it(tmp_path):
    store = Store(str(tmp_path))
    committed(store, "a.parquet")
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["text"] for row in rows] == ["c", "c"]
    assert [row["reward"] for row in rows] == [0.0, 1.0]
    assert [row["advantage"] for row in rows] == [-0.5, 0.5]
    assert rows[0]["verdicts"][0]["outcome"] == "invalid"
    assert rows[0]["spans"] == [{"version": 7, "start": 0, "end": 2}]
