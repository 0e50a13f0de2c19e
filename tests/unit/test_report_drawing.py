"""Coordinates, overlaps and credentials of the report, against worked examples and brute force."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.report import charts, timeline
from workers.report.charts import Series, draw, thinned, ticks
from workers.report.records import _over_restarts
from workers.report.redaction import HIDDEN, Redactor
from workers.report.responses import pieces_of
from workers.report.timeline import Stage, common, joined, timeline_of

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda s: (float(s[0]), float(sum(s)))),
    max_size=12,
)


def seconds_in(spans: Sequence[tuple[float, float]]) -> set[int]:
    return {second for start, end in spans for second in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_unions_and_overlaps_are_those_of_sets_of_seconds(one, other):
    first, second = joined(one, 0.0), joined(other, 0.0)
    assert sum(end - start for start, end in first) == len(seconds_in(one))
    assert common(first, second) == len(seconds_in(one) & seconds_in(other))


def test_bars_closer_than_half_a_pixel_become_one():
    assert joined([(0, 1), (1.4, 2), (3, 4)], 0.5) == [(0, 2), (3, 4)]


def test_costs_of_overlapping_stages():
    stages = [
        Stage("training", 0, 100.0, 110.0, True),
        Stage("generation_wait", 1, 105.0, 125.0, True),
        Stage("training", 1, 125.0, 130.0, False),
    ]
    told = timeline_of(stages, [(100.0, 120.0)])
    assert told is not None
    assert told.seconds == 30
    costs = {cost.name: cost for cost in told.costs}
    training = costs["training"]
    assert (training.count, training.failed, training.seconds) == (2, 1, 15)
    assert (training.median, training.longest, training.share) == (7.5, 10, 0.5)
    assert costs["generation_wait"].during_training == 5 / 20
    assert costs["sampling"].during_training == 10 / 20
    assert [picture.title for picture in told.pictures] == ["the whole run"]


def test_a_close_up_has_a_bar_for_each_stage_and_names_it():
    stages = [
        Stage(name, update, 10.0 * update + offset, 10.0 * update + offset + 4, update != 11)
        for update in range(20)
        for name, offset in (("generation_wait", 0), ("training", 5))
    ]
    told = timeline_of(stages, [])
    assert told is not None
    assert [p.title for p in told.pictures] == [
        "the whole run", "updates 7 to 12", "updates 14 to 19",
    ]  # fmt: skip
    lane = next(lane for lane in told.pictures[1].lanes if lane.name == "training")
    assert [bar.label for bar in lane.bars] == ["7", "8", "9", "10", "11", "12"]
    assert lane.bars[4].title == "training of update 11: 4 s, failed"
    assert not lane.bars[4].passed
    for bar in lane.bars:
        assert timeline.LEFT <= float(bar.x) <= timeline.WIDTH - float(bar.width)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_inside(low, extent):
    found = ticks(low, low + extent)
    assert len(found) <= 6
    for tick in found:
        assert low - extent * 1e-6 - 1e-6 <= tick <= low + extent * (1 + 1e-6) + 1e-6


def test_ticks_of_a_known_range():
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3.0, 41.0) == [10, 20, 30, 40]


def test_points_lie_where_the_scale_puts_them():
    chart = draw("t", "1", "m", [Series("s", [(0.0, 0.0), (5.0, 1.0), (10.0, 0.5)])])
    assert chart is not None
    path = [tuple(map(float, pair.split())) for pair in chart.curves[0].path[1:].split("L")]
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    assert [x for x, _ in path] == pytest.approx([left, (left + right) / 2, right], abs=0.06)
    floor, ceiling, middle = (y for _, y in path)
    assert floor > middle > ceiling  # down is greater
    assert middle == pytest.approx((floor + ceiling) / 2, abs=0.11)
    assert draw("t", "1", "m", [Series("s", [])]) is None


def test_thinning_keeps_the_extremes():
    points = [(float(x), 0.0) for x in range(100_000)]
    points[70_001], points[12] = (70_001.0, 9.0), (12.0, -9.0)
    kept = thinned(points)
    assert len(kept) <= 2 * charts.MOST_BUCKETS
    assert (70_001.0, 9.0) in kept
    assert (12.0, -9.0) in kept
    assert kept == sorted(kept)


def test_a_counter_that_starts_over_with_its_process_is_summed():
    rows = [{"n": value} for value in (0, 3, 5, 0, 2, None, 2, 1)]
    assert _over_restarts(rows, "n") == 5 + 2 + 1


def test_tokens_that_make_one_character_stay_together_within_a_version():
    letters = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"b"}

    def decode(ids: Sequence[int]) -> str:
        return b"".join(letters[each] for each in ids).decode(errors="replace")

    pieces = pieces_of([1, 2, 3, 4], [7, 7, 7, 8], [-1.0, -2.0, -3.0, -4.0], decode)
    assert [(piece.text, piece.starts) for piece in pieces] == [("a", 7), ("é", None), ("b", 8)]
    assert pieces[1].title == "token 1, id 2, 3, version 7, log-prob -2.000"
    split = pieces_of([2, 3], [7, 8], [], decode)
    assert [(piece.text, piece.starts) for piece in split] == [("\ufffd", 7), ("\ufffd", 8)]


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    ],
)
def test_shapes_of_credentials_are_hidden(secret):
    assert Redactor().text(f"before {secret} after") == f"before {HIDDEN} after"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("https://me:pw@host/p", f"https://{HIDDEN}@host/p"),
        (
            "https://h/p?a=1&X-Amz-Signature=abc&b=2",
            f"https://h/p?a=1&X-Amz-Signature={HIDDEN}&b=2",
        ),
        ("Authorization: Bearer abcdefghijklmnop", f"Authorization: Bearer {HIDDEN}"),
        ("WANDB_API_KEY=xyz and more", f"WANDB_API_KEY={HIDDEN} and more"),
        ('{"service_token": "xyz"}', f'{{"service_token": "{HIDDEN}"}}'),
        ("-----BEGIN RSA PRIVATE KEY-----\nx\n-----END RSA PRIVATE KEY-----!", f"{HIDDEN}!"),
    ],
)
def test_credentials_are_hidden_where_they_are_named(text, hidden):
    assert Redactor().text(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "train/micro_batch_tokens=4096", "the basic idea", "http://127.0.0.1:7233/x",
        "s3://bucket/key", "asianamericanstudies", "token 5, id 6", "sk-learn",
        "lr = 1e-4", "a" * 64,
    ],
)  # fmt: skip
def test_what_is_no_credential_is_left_alone(text):
    assert Redactor().text(text) == text


def test_documents_keep_their_keys():
    document = {
        "launch": {"env": {"NOTE": "value", "EMPTY": ""}, "fleet": "local"},
        "list": [{"password": "p", "eos_token_ids": [2]}],
        "trainer": {"micro_batch_tokens": 4096},
    }
    assert Redactor().document(document) == {
        "launch": {"env": {"NOTE": HIDDEN, "EMPTY": ""}, "fleet": "local"},
        "list": [{"password": HIDDEN, "eos_token_ids": [2]}],
        "trainer": {"micro_batch_tokens": 4096},
    }


def test_longer_known_values_are_hidden_before_shorter_ones():
    redactor = Redactor(["secret", "secret-longer", "1"])
    assert redactor.text("secret-longer 1 secret") == f"{HIDDEN} 1 {HIDDEN}"


def test_hiding_is_linear_in_the_text():
    """A response may be built to make a search go back over and over."""
    for hostile in (
        "a_", "://", "?", "-----BEGIN ", "x:", "bearer ", "eyJaaaaaaaa-", "x_token_",
    ):  # fmt: skip
        for text in (hostile * 15_000, f"://{hostile * 15_000}", f"?{hostile * 15_000}"):
            assert HIDDEN not in Redactor().text(text)
    assert HIDDEN not in Redactor().text("://" + ":" * 200_000)
    assert HIDDEN not in Redactor().text("?" + "token" * 40_000)
