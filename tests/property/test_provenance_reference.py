"""Normalization against a reference that writes down the version of every single token."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from activities.rollout.provenance import normalize
from models.errors import ContractViolation

VERSIONS = st.integers(0, 3)


@st.composite
def records(draw):
    """Mostly contiguous spans, now and then with one number moved."""
    length = draw(st.integers(1, 6))
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    edges = [0, *cuts, length]
    versions = draw(st.lists(VERSIONS, min_size=len(edges) - 1, max_size=len(edges) - 1))
    if draw(st.booleans()):
        versions.sort()
    told = [
        {"version": version, "start": start, "end": end}
        for version, start, end in zip(versions, edges, edges[1:], strict=False)
    ]
    if draw(st.booleans()):
        moved = draw(st.sampled_from(told))
        key = draw(st.sampled_from(["version", "start", "end"]))
        moved[key] += draw(st.sampled_from([-1, 1]))
    return told, length, draw(st.sampled_from([versions[-1], max(versions)]) | VERSIONS)


def token_versions(told, length, replay):
    """The version of each token, or None when the record is invalid; straight from the rules."""
    versions = []
    for span in told:
        if span["version"] < 0 or span["start"] != len(versions) or span["end"] < span["start"]:
            return None
        versions += [span["version"]] * (span["end"] - span["start"])
    valid = len(versions) == length and versions == sorted(versions) and versions[-1] == replay
    return versions if valid else None


@given(records())
def test_normal_spans_say_what_the_reference_says(record):
    told, length, replay = record
    expected = token_versions(told, length, replay)
    try:
        found = normalize(told, length, replay)
    except ContractViolation:
        assert expected is None
        return
    assert [span.version for span in found for _ in range(span.start, span.end)] == expected
    assert all(span.start < span.end for span in found)
    assert all(left.version < right.version for left, right in pairwise(found))
    assert all(left.end == right.start for left, right in pairwise(found))
