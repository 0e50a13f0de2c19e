"""Token spans: what is normal, what is refused, and that the refusal names the field."""

import math
from dataclasses import replace

import pytest

from activities.rollout.provenance import check_sample, normalize, parse_version, routes_problem
from models.errors import ContractViolation
from models.sample import FinishReason, Sample, TokenSpan


def spans(*triples):
    return [{"version": v, "start": start, "end": end} for v, start, end in triples]


def normal(*triples):
    return [TokenSpan(*each) for each in triples]


@pytest.mark.parametrize(
    ("told", "replay", "expected"),
    [
        (spans((5, 0, 4), (7, 4, 10)), 7, normal((5, 0, 4), (7, 4, 10))),
        (spans((7, 0, 10)), 7, normal((7, 0, 10))),
        (spans(("7", 0, 4), (7, 4, 10)), 7, normal((7, 0, 10))),
        (spans((5, 0, 2), (5, 2, 4), (7, 4, 10)), 7, normal((5, 0, 4), (7, 4, 10))),
        (spans((5, 0, 0), (5, 0, 4), (6, 4, 4), (7, 4, 10)), 7, normal((5, 0, 4), (7, 4, 10))),
        (spans((9, 0, 0), (7, 0, 10), (3, 10, 10)), 7, normal((7, 0, 10))),  # no token is theirs
        (spans((0, 0, 1), (1, 1, 2), (7, 2, 10)), 7, normal((0, 0, 1), (1, 1, 2), (7, 2, 10))),
        (normal((5, 0, 4), (7, 4, 10)), 7, normal((5, 0, 4), (7, 4, 10))),
    ],
)
def test_the_normal_form(told, replay, expected):
    assert normalize(told, 10, replay) == expected
    assert normalize(expected, 10, replay) == expected


@pytest.mark.parametrize(
    ("told", "replay", "message"),
    [
        (spans((5, 0, 4), (6, 4, 10)), 7, "end at version 6, the last forward was of version 7"),
        (spans((7, 0, 4), (6, 4, 10)), 7, r"spans\[1\]\.version falls from 7 to 6"),
        (spans((5, 0, 4), (8, 4, 10)), 7, r"spans\[1\]\.version is 8, above the last forward's 7"),
        (spans((7, 1, 10)), 7, r"spans\[0\]\.start is 1, expected 0"),
        (spans((7, -1, 10)), 7, r"spans\[0\]\.start is -1, expected 0"),
        (spans((5, 0, 4), (7, 5, 10)), 7, r"spans\[1\]\.start is 5, expected 4"),
        (spans((5, 0, 4), (7, 3, 10)), 7, r"spans\[1\]\.start is 3, expected 4"),
        (spans((7, 0, 11)), 7, r"spans\[0\]\.end is 11, outside \[0, 10\]"),
        (spans((5, 0, 4), (7, 4, 3)), 7, r"spans\[1\]\.end is 3, outside \[4, 10\]"),
        (spans((7, 0, 9)), 7, "spans end at 9, the response has 10 tokens"),
        (spans((7, 0, 0)), 7, "spans end at 0, the response has 10 tokens"),
        ([], 7, "spans: there is none"),
        ([None], 7, r"spans\[0\] is None, expected exactly version, start and end"),
        ([(7, 0, 10)], 7, r"spans\[0\] is \(7, 0, 10\)"),
        ([{"version": 7, "start": 0}], 7, r"spans\[0\] is \{'version': 7, 'start': 0\}"),
        ([{**spans((7, 0, 10))[0], "extra": 1}], 7, "expected exactly"),
        (spans((7, False, 10)), 7, r"spans\[0\]: start and end are False and 10, not ints"),
        (spans((7, 0, 10.0)), 7, r"spans\[0\]: start and end are 0 and 10\.0, not ints"),
        (spans((7, "0", 10)), 7, r"spans\[0\]: start and end are '0' and 10, not ints"),
        (spans((True, 0, 10)), 1, r"spans\[0\]\.version: True is no policy version"),
        (spans((-1, 0, 10)), 7, r"spans\[0\]\.version: -1 is no policy version"),
        (spans(("v7", 0, 10)), 7, r"spans\[0\]\.version: 'v7' is no policy version"),
    ],
)
def test_every_violation_names_the_span(told, replay, message):
    with pytest.raises(ContractViolation, match=message):
        normalize(told, 10, replay)


def test_an_empty_response_is_refused():
    with pytest.raises(ContractViolation, match="the response has no tokens"):
        normalize(spans((7, 0, 0)), 0, 7)


@pytest.mark.parametrize(("value", "version"), [(0, 0), (12, 12), ("0", 0), ("12", 12), ("07", 7)])
def test_versions(value, version):
    assert parse_version(value) == version


NO_VERSIONS = [True, False, -1, 1.0, None, "-1", "+1", "1.0", "", " 1", "1\n", "1_0", "default"]


@pytest.mark.parametrize("value", [*NO_VERSIONS, "\N{ARABIC-INDIC DIGIT ONE}", "9" * 19])
def test_what_is_no_version(value):
    with pytest.raises(ContractViolation, match="is no policy version"):
        parse_version(value)


def sample(**changes):
    good = Sample(
        sample_index=12,
        group_index=3,
        prompt_token_ids=[1, 2],
        response_token_ids=[3, 4, 0],
        logprobs=[-0.25, -1.5, -0.5],
        spans=normal((5, 0, 1), (7, 1, 3)),
        finish_reason=FinishReason.STOP,
        routed_experts=bytes(4 * 4 * 2),
    )
    return replace(good, **changes)


def test_a_good_sample():
    check_sample(sample())
    check_sample(sample(routed_experts=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_token_ids": [], "logprobs": []}, "response_token_ids is empty"),
        ({"logprobs": [-0.25, -1.5]}, "logprobs has 2 values for 3 response tokens"),
        ({"logprobs": [-0.25, math.nan, -1]}, r"logprobs\[1\] is nan"),
        ({"logprobs": [-0.25, -1, -math.inf]}, r"logprobs\[2\] is -inf"),
        ({"spans": []}, "spans: there is none"),
        ({"spans": normal((7, 0, 2))}, "spans end at 2, the response has 3 tokens"),
        ({"spans": normal((7, 0, 1), (5, 1, 3))}, "above the last forward's 5"),
        ({"spans": normal((7, 0, 1), (7, 1, 3))}, "spans are not in normal form"),
        ({"finish_reason": FinishReason.ABORT}, "finish_reason is abort"),
        ({"routed_experts": b""}, "routed_experts has 0 bytes, no int32 table of 4 rows"),
        ({"routed_experts": bytes(20)}, "routed_experts has 20 bytes, no int32 table of 4 rows"),
    ],
)
def test_a_bad_sample_is_named_with_its_field(changes, message):
    with pytest.raises(ContractViolation, match=f"^prompt group 3, sample 12: .*{message}"):
        check_sample(sample(**changes))


def test_routes_are_whole_rows():
    """As recorded of a served mixture of experts: 12 + 3 tokens, 4 layers, top-2."""
    assert routes_problem(bytes(448), 15) is None
    assert routes_problem(bytes(448), 16) is not None
    assert routes_problem(bytes(8), 1) is not None  # one token alone was fed to no forward
