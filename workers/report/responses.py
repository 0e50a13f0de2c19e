"""A few responses of a run, token by token: which policy version sampled each of them."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq

from activities.rollout.collection_file import SCHEMA
from activities.storage import layout
from workers.report.curves import Curves
from workers.report.files import Row, RunFiles, parts
from workers.report.redaction import Redactor

MOST_TOKENS = 400
"""Shown of a response."""
PROMPT_CHARS = 1_500
COLLECTIONS = 5
"""Spread over the run; up to two more for responses of several versions."""
COLORS = 8
_PIECE_TOKENS = 6
"""Most tokens that one character is cut into."""
_COLLECTION = re.compile(r"(\d{7,})\.e(\d+)\.parquet")
_MIXED = "rollout/weight_version/mixed_version_ratio"

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Piece:
    """One token, or those that make one character together."""

    text: str
    color: int
    starts: int | None
    """The version that begins here; none within a span."""
    title: str


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response as it is shown."""

    update: int
    group: int
    sample: int
    prompt_id: str
    prompt: str
    reward: float | None
    advantage: float | None
    finish: str
    tokens: int
    versions: tuple[tuple[int, int, int], ...]
    """(version, tokens, color)."""
    pieces: tuple[Piece, ...]
    hidden: str
    """Shown in place of the pieces when they hold a credential."""
    verdicts: tuple[str, ...]


def sampled_responses(
    files: RunFiles, curves: Curves, redactor: Redactor, decode: Decode | None, most: int
) -> list[Response]:
    """At most ``most`` responses: of each chosen collection mixed, best, worst and middle ones."""
    newest: dict[int, str] = {}
    for name in files.names(layout.ROLLOUTS):  # sorted: of one update the newest epoch comes last
        if match := _COLLECTION.fullmatch(name):
            newest[int(match[1])] = name
    updates = _chosen(sorted(newest), [int(u) for u, share in curves.of(_MIXED) if share > 0])
    each = math.ceil(most / len(updates)) if updates else 0
    shown: list[Response] = []
    for update in updates:
        rows = _rows(files, f"{layout.ROLLOUTS}/{newest[update]}")
        try:
            picked = _picked(rows, min(each, most - len(shown)))
            shown += [_response(update, row, redactor, decode) for row in picked]
        except (KeyError, TypeError, ValueError) as error:  # columns of another shape
            files.note(f"{layout.ROLLOUTS}/{newest[update]}", error)
    return shown


def pieces_of(
    tokens: Sequence[int],
    versions: Sequence[int | None],
    logprobs: Sequence[float],
    decode: Decode | None,
) -> list[Piece]:
    """The response in pieces that are whole characters of one version."""
    pieces, at = [], 0
    while at < len(tokens):
        end = at + 1
        text = decode(tokens[at:end]) if decode else f"{tokens[at]} "
        while (
            "\ufffd" in text
            and end < min(len(tokens), at + _PIECE_TOKENS)
            and versions[end] == versions[at]
        ):
            end += 1
            text = decode(tokens[at:end]) if decode else text
        version = versions[at]
        begins = at == 0 or versions[at - 1] != version
        ids = ", ".join(map(str, tokens[at:end]))
        said = "?" if version is None else version
        chance = f", log-prob {logprobs[at]:.3f}" if at < len(logprobs) else ""
        pieces.append(
            Piece(
                text=text,
                color=_color(version),
                starts=version if begins else None,
                title=f"token {at}, id {ids}, version {said}{chance}",
            )
        )
        at = end
    return pieces


def _chosen(updates: Sequence[int], mixed: Sequence[int]) -> list[int]:
    if not updates:
        return []
    last = len(updates) - 1
    spread = {updates[round(last * step / (COLLECTIONS - 1))] for step in range(COLLECTIONS)}
    there = [update for update in mixed if update in set(updates)]
    return sorted(spread | {*there[len(there) // 2 :][:1], *there[-1:]})


def _rows(files: RunFiles, path: str) -> list[Row]:
    """Rows without expert routes, which are larger than all else together."""
    try:
        table = pq.read_table(io.BytesIO(files.store.read_bytes(path)), columns=SCHEMA.names)
        rows: list[Row] = table.to_pylist()
    except (OSError, ValueError, KeyError) as error:  # Arrow's own errors are among these
        files.note(path, error)
        return []
    return rows


def _picked(rows: Sequence[Row], count: int) -> list[Row]:
    """Those of most versions first, then by turns the best and the worst of different prompts."""
    mixed = sorted(rows, key=lambda row: -len({span["version"] for span in parts(row, "spans")}))
    wanted = [row for row in mixed if len(parts(row, "spans")) > 1][: count // 2]
    by_reward = sorted(rows, key=lambda row: _finite(row["reward"]) or 0.0)
    prompts = {row["group_index"] for row in wanted}
    while by_reward and len(wanted) < count:
        row = by_reward.pop(-1 if len(wanted) % 2 == 0 else 0)
        if row["group_index"] not in prompts or len(by_reward) < count:
            wanted.append(row)
            prompts.add(row["group_index"])
    return wanted[:count]


def _response(update: int, row: Row, redactor: Redactor, decode: Decode | None) -> Response:
    tokens: list[int] = row["response_token_ids"] or []
    versions = _versions(row, len(tokens))
    whole = decode(tokens) if decode else str(row["text"] or "")
    clean = redactor.text(whole)
    shown = tokens[:MOST_TOKENS]
    counts: dict[int, int] = {}
    for version in versions:
        if version is not None:
            counts[version] = counts.get(version, 0) + 1
    prompt_ids: list[int] = row["prompt_token_ids"] or []
    prompt = decode(prompt_ids) if decode else " ".join(map(str, prompt_ids))
    return Response(
        update=update,
        group=row["group_index"],
        sample=row["sample_index"],
        prompt_id=str(row["prepared_sample_id"]),
        prompt=redactor.text(prompt)[:PROMPT_CHARS],
        reward=_finite(row["reward"]),
        advantage=_finite(row["advantage"]),
        finish=str(row["finish_reason"]),
        tokens=len(tokens),
        versions=tuple((version, count, _color(version)) for version, count in counts.items()),
        pieces=()
        if clean != whole
        else tuple(pieces_of(shown, versions, row["logprobs"] or [], decode)),
        hidden=clean[: 4 * MOST_TOKENS] if clean != whole else "",
        verdicts=tuple(redactor.text(_verdict(verdict)) for verdict in parts(row, "verdicts")),
    )


def _versions(row: Row, length: int) -> list[int | None]:
    """The behavior version of every token; none where no span says."""
    versions: list[int | None] = [None] * length
    for span in parts(row, "spans"):
        for at in range(max(0, span["start"]), min(length, span["end"])):
            versions[at] = span["version"]
    return versions


def _verdict(verdict: Row) -> str:
    score = _finite(verdict["score"])
    said = verdict["outcome"] if score is None else f"{verdict['outcome']} {score:.3g}"
    detail = f" ({verdict['detail']})" if verdict["detail"] else ""
    return f"{verdict['name']}: {said}{detail}"


def _color(version: int | None) -> int:
    return COLORS if version is None else version % COLORS


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value
