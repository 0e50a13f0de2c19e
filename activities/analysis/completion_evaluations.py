"""Whether every evaluation that the run file asks for left its samples and its row."""

import io
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from activities.analysis.completion import (
    Check,
    Flaw,
    Root,
    file_flaws,
    numbers,
    recorded_names,
    try_read,
)
from activities.background.receipts import COMPLETE, receipts
from activities.storage import layout

_PARQUET = re.compile(r"eval_(\d{7,})\.e(\d+)\.parquet")
Row = dict[str, Any]
_AGAIN = "evaluate the checkpoint or export of that update again, or restore the file from a copy"


def expected_evaluations(root: Root) -> list[int]:
    """Numbers of finished updates after which the run file asks for an evaluation."""
    plan, updates = root.plan, root.expected_updates
    if plan is None or updates is None:
        return []
    wanted = {0} if plan.eval_initial else set()
    if plan.eval_interval is not None:
        wanted |= set(range(plan.eval_interval, updates + 1, plan.eval_interval))
    if plan.eval_final:
        wanted.add(updates)
    return sorted(update for update in wanted if update >= root.forked_at)


def check_evaluations(root: Root) -> Check:
    """Whether each expected evaluation is on record, with the samples that it should have."""
    wanted = expected_evaluations(root)
    background = root.plan is not None and root.plan.eval_background
    found = root.store.read_jsonl(layout.METRICS).rows
    rows = [row for row in found if row.get("kind") == "eval"]
    flaws = (_background_flaws if background else _shared_flaws)(root, wanted, rows)
    evidence = f"{len(wanted)} expected, after {numbers(wanted)} updates"
    if not background:
        evidence += f", {_samples(root) or '?'} samples each"
    last = _last_rows(rows)
    unproved = [update for update in wanted if update in last and "sha256" not in last[update]]
    if unproved:
        evidence += f"; no digest recorded after {numbers(unproved)} updates"
    elif wanted:
        evidence += ", by SHA-256"
    return Check("evaluations", evidence, tuple(flaws))


def _last_rows(rows: list[Row]) -> dict[int, Row]:
    """Finished updates -> the last row of their evaluation."""
    return {int(row["update"]): row for row in rows}


def _shared_flaws(root: Root, wanted: list[int], rows: list[Row]) -> list[Flaw]:
    last = _last_rows(rows)
    epochs: dict[int, int] = {}
    for match in recorded_names(root.store, layout.ROLLOUTS, _PARQUET):
        update = int(match[1])
        epochs[update] = max(int(match[2]), epochs.get(update, 0))
    flaws = []
    for update in wanted:
        row = last.get(update, {})
        if not row:
            problem = f"no row of the evaluation after {update} updates"
            flaws.append(Flaw(root.path(layout.METRICS), problem, _AGAIN))
        rel = row.get("uri") or layout.eval_parquet(update, epochs.get(update, 1))
        changed = list(file_flaws(root, rel, None, row.get("sha256"), _AGAIN))
        flaws += changed or _count_flaws(root, rel)
    return flaws


def _count_flaws(root: Root, rel: str) -> Iterator[Flaw]:
    """Whether the Parquet file ``rel`` has a row for each sample that was asked for."""
    found = try_read(partial(_num_rows, root, rel))
    expected = _samples(root)
    if isinstance(found, str):
        yield Flaw(root.path(rel), found, _AGAIN)
    elif expected is not None and found != expected:
        yield Flaw(root.path(rel), f"{found} samples instead of {expected}", _AGAIN)


def _background_flaws(root: Root, wanted: list[int], rows: list[Row]) -> list[Flaw]:
    digests = {row.get("uri"): row.get("sha256") for row in rows}
    complete: set[int] = set()
    places: dict[int, str] = {}
    flaws: list[Flaw] = []
    for rel, receipt in receipts(root.store):
        places[receipt.update] = rel
        if (receipt.result or {}).get("status") != COMPLETE:
            continue
        complete.add(receipt.update)
        for name in (layout.EVAL_PROVENANCE, layout.EVAL_SAMPLES, layout.EVAL_SCORES):
            result = f"{layout.eval_results(rel)}/{name}"
            flaws += file_flaws(root, result, None, digests.get(result), _AGAIN)
    for update in wanted:
        if update in complete:
            continue
        where = root.path(places.get(update, layout.EVALUATION))
        remedy = f"submit it again: perdure evaluation resubmit {where}"
        if update not in places:
            remedy = _AGAIN
        flaws.append(Flaw(where, f"no complete evaluation after {update} updates", remedy))
    return flaws


def _samples(root: Root) -> int | None:
    """Samples of one evaluation: held-out prompts times samples a prompt; none when unknown."""
    report: Any = try_read(partial(root.store.read_json, layout.PREPARED_REPORT))
    if root.spec is None or not isinstance(report, dict) or "eval_prompts" not in report:
        return None
    return int(report["eval_prompts"]) * root.spec.evaluation.samples_per_prompt


def _num_rows(root: Root, rel: str) -> int:
    try:
        table = pq.read_table(io.BytesIO(root.store.read_bytes(rel)))
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    return int(table.num_rows)
