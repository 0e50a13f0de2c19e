"""The Parquet file of a collection or an evaluation: one row a sample, readable by people."""

import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from activities.rollout.provenance import check_sample
from activities.storage.store import Store
from models.errors import DigestMismatch
from models.rollout import RolloutCollection
from models.sample import (
    FinishReason,
    Sample,
    SampleGroup,
    TokenSpan,
    Verdict,
    VerdictOutcome,
)

SCHEMA = pa.schema(
    [
        ("group_index", pa.int64()),
        ("sample_index", pa.int64()),
        ("prepared_sample_id", pa.string()),
        ("epoch_id", pa.int64()),
        ("text", pa.string()),
        ("reward", pa.float64()),  # NaN: no verifier could score it
        ("advantage", pa.float64()),  # null: not computed (evaluation)
        ("finish_reason", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response_token_ids", pa.list_(pa.int32())),  # [T]
        ("logprobs", pa.list_(pa.float64())),  # [T], of the behavior policy
        (
            "spans",
            pa.list_(
                pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
            ),
        ),
        (
            "verdicts",
            pa.list_(
                pa.struct(
                    [
                        ("name", pa.string()),
                        ("outcome", pa.string()),
                        ("score", pa.float64()),
                        ("weight", pa.float64()),
                        ("detail", pa.string()),
                        ("diagnostics", pa.string()),  # JSON
                    ]
                )
            ),
        ),
    ]
)

ROUTED_EXPERTS = pa.field("routed_experts", pa.binary())
"""int32 [prompt + T - 1, layers, top_k]; a file without any has no such column."""
_ROUTED_OPTIONS: dict[str, Any] = {"use_dictionary": False, "write_batch_size": 4}
"""Routes are megabytes a row and never equal: a dictionary of them doubles the time and saves
nothing, and a page grows by as many rows as are written at once."""
LOSS_MASK = pa.field("loss_mask", pa.list_(pa.int8()))
"""[T] of 0 and 1; a file without any has no such column."""


ROWS_AT_ONCE = 64
"""Turned into columns without a turn for other threads, the producer's event loop among them."""


class GroupIdentity(NamedTuple):
    """Which prompt a group answers: hand-out number, prepared row, pass over the data."""

    group_index: int
    prepared_sample_id: str
    epoch_id: int


class GroupOutcome(NamedTuple):
    """A group as it stands in a file."""

    identity: GroupIdentity
    samples: int
    """Different samples."""
    scored: int
    """Those of them with a reward."""
    times: int
    """How often the file holds it: more than once is a fault of whoever wrote it."""


def write_collection(store: Store, rel: str, groups: Sequence[SampleGroup]) -> str:
    """Write ``groups`` to ``rel`` atomically and return the SHA-256 hex of the file.

    Equal groups make equal bytes: nothing of the clock or the machine enters the file.
    """
    rows = [_row(group, position) for group in groups for position in range(len(group.samples))]
    schema = SCHEMA
    for field in (ROUTED_EXPERTS, LOSS_MASK):
        if any(row[field.name] is not None for row in rows):
            schema = schema.append(field)
    buffer = io.BytesIO()
    options = _ROUTED_OPTIONS if ROUTED_EXPERTS.name in schema.names else {}
    table = pa.concat_tables(
        pa.Table.from_pylist(rows[start : start + ROWS_AT_ONCE], schema=schema)
        for start in range(0, max(1, len(rows)), ROWS_AT_ONCE)
    )
    pq.write_table(table, buffer, compression="zstd", **options)
    del table
    # The pool keeps the writer's buffers, and every thread's again: megabytes that come to stay.
    pa.default_memory_pool().release_unused()
    data = buffer.getvalue()
    store.write_bytes(rel, data)
    return hashlib.sha256(data).hexdigest()


def read_collection(store: Store, collection: RolloutCollection) -> list[SampleGroup]:
    """The groups of a committed collection, in hand-out order.

    Raises:
        DigestMismatch: the file is not the one that was committed.
        ContractViolation: a sample whose log-probs or token spans do not fit its tokens.
    """
    data = _committed_bytes(store, collection.uri, collection.sha256)
    groups = list(_groups(pq.read_table(io.BytesIO(data)).to_pylist()))
    for group in groups:
        for sample in group.samples:
            check_sample(sample)
    return groups


def read_outcomes(store: Store, uri: str, sha256: str) -> list[GroupOutcome]:
    """What the file ``uri`` holds of each group, in the order of the file, without tokens.

    Raises:
        DigestMismatch: the file does not have this ``sha256``.
    """
    data = _committed_bytes(store, uri, sha256)
    columns = [*GroupIdentity._fields, "sample_index", "reward"]
    rows = pq.read_table(io.BytesIO(data), columns=columns).to_pydict()
    held: dict[GroupIdentity, Counter[int]] = {}
    scored: Counter[GroupIdentity] = Counter()
    for *identity, sample_index, reward in zip(*(rows[name] for name in columns), strict=True):
        group = GroupIdentity(*identity)
        samples = held.setdefault(group, Counter())
        samples[sample_index] += 1
        scored[group] += samples[sample_index] == 1 and not math.isnan(reward)
    return [
        GroupOutcome(group, len(samples), scored[group], max(samples.values()))
        for group, samples in held.items()
    ]


def read_samples(store: Store, rel: str) -> list[SampleGroup]:
    """The groups in ``rel`` without a digest check, for people's tools."""
    return list(_groups(pq.read_table(io.BytesIO(store.read_bytes(rel))).to_pylist()))


def _committed_bytes(store: Store, uri: str, sha256: str) -> bytes:
    data = store.read_bytes(uri)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DigestMismatch(f"{store.root}/{uri} has SHA-256 {found}, committed was {sha256}")
    return data


def _row(group: SampleGroup, position: int) -> dict[str, Any]:
    sample = group.samples[position]
    return {
        "group_index": group.group_index,
        "sample_index": sample.sample_index,
        "prepared_sample_id": group.prepared_sample_id,
        "epoch_id": group.epoch_id,
        "text": sample.text,
        "reward": sample.reward,
        "advantage": group.advantages[position] if group.advantages else None,
        "finish_reason": sample.finish_reason.value,
        "prompt_token_ids": sample.prompt_token_ids,
        "response_token_ids": sample.response_token_ids,
        "logprobs": sample.logprobs,
        "spans": [
            {"version": span.version, "start": span.start, "end": span.end} for span in sample.spans
        ],
        "verdicts": [
            {
                "name": verdict.name,
                "outcome": verdict.outcome.value,
                "score": verdict.score,
                "weight": verdict.weight,
                "detail": verdict.detail,
                "diagnostics": json.dumps(verdict.diagnostics, sort_keys=True),
            }
            for verdict in sample.verdicts
        ],
        ROUTED_EXPERTS.name: sample.routed_experts,
        LOSS_MASK.name: sample.loss_mask,
    }


def _groups(rows: list[dict[str, Any]]) -> Iterator[SampleGroup]:
    for group_index, siblings in groupby(rows, key=lambda row: row["group_index"]):
        members = list(siblings)
        advantages = [row["advantage"] for row in members if row["advantage"] is not None]
        yield SampleGroup(
            group_index=group_index,
            prepared_sample_id=members[0]["prepared_sample_id"],
            epoch_id=members[0]["epoch_id"],
            samples=[_sample(row) for row in members],
            advantages=advantages,
        )


def _sample(row: dict[str, Any]) -> Sample:
    return Sample(
        sample_index=row["sample_index"],
        group_index=row["group_index"],
        prompt_token_ids=row["prompt_token_ids"],
        response_token_ids=row["response_token_ids"],
        logprobs=row["logprobs"],
        spans=[TokenSpan(**span) for span in row["spans"]],
        finish_reason=FinishReason(row["finish_reason"]),
        text=row["text"],
        reward=math.nan if row["reward"] is None else row["reward"],
        verdicts=[_verdict(row) for row in row["verdicts"]],
        loss_mask=row.get(LOSS_MASK.name),
        routed_experts=row.get(ROUTED_EXPERTS.name),
    )


def _verdict(row: dict[str, Any]) -> Verdict:
    return Verdict(
        name=row["name"],
        outcome=VerdictOutcome(row["outcome"]),
        score=row["score"],
        weight=row["weight"],
        detail=row["detail"],
        diagnostics=json.loads(row["diagnostics"]),
    )
