"""``rollout_flow.jsonl``: one row a collection, of what went to the trainer and what waiting cost.

A collection whose commit is retried, or that is sampled again after a loss, repeats its row: the
last row of a ``rollout_id`` counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from activities.storage import layout
from activities.storage.store import Store
from models.sample import SampleGroup


def flow_row(
    update: int,
    groups: Sequence[SampleGroup],
    *,
    wait_seconds: float,
    queue_metrics: Mapping[str, float],
) -> dict[str, Any]:
    """The row of the collection of ``update``.

    Args:
        update: its index.
        groups: the groups that it consists of.
        wait_seconds: from the request for the collection to its last group.
        queue_metrics: ``QueueMetrics.collect`` of the window that it ends.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.response_token_ids) for sample in samples]
    return {
        "rollout_id": update,
        "samples": len(samples),
        "response_tokens": sum(lengths),
        "response_lengths": lengths,
        "collection_wait_seconds": wait_seconds,
        "mixed_responses": sum(
            len({span.version for span in sample.spans}) > 1 for sample in samples
        ),
        "queue_metrics": dict(queue_metrics),
        "sibling_group_attempts": [
            group.times.group_attempt for group in groups if group.times is not None
        ],
    }


def append_flow(store: Store, row: Mapping[str, Any]) -> None:
    """Append ``row``. Blocks.

    To be done before the collection's manifest is written, so that every collection that counts
    has its row. Raises ``StorageFull`` as the manifest would.
    """
    store.append_jsonl(layout.ROLLOUT_FLOW, dict(row))
