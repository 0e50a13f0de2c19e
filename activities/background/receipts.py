"""Receipts of background evaluations: one file each, whose exclusive creation claims it."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from activities.rollout.held_out import EVAL_NAME
from activities.storage import layout
from activities.storage.store import Store
from configs.run import RunSpec
from models.background import EvaluationReceipt
from models.errors import ContractViolation, PerdureError
from models.evaluation import ReceiptStatus

KEY_CHARS = 16
COMPLETE, FAILED = "complete", "failed"
"""``result.status`` of a receipt, and ``status`` of ``evaluation.json``."""
OPEN = (ReceiptStatus.CLAIMED, ReceiptStatus.PENDING, ReceiptStatus.SUBMITTED)
"""States of a receipt whose evaluation may still come."""

_NAME = re.compile(r"update-(\d{8,})-([0-9a-f]{16})(-manual-[0-9a-f]{16})?\.json")


def evaluation_tasks(spec: RunSpec) -> tuple[dict[str, Any], ...]:
    """What an evaluation of this run samples and how it scores: one task, the held-out set."""
    evaluation, inference = spec.evaluation, spec.inference
    return (
        {
            "task": EVAL_NAME,
            "interval": evaluation.interval,
            "generation": {
                "samples_per_prompt": evaluation.samples_per_prompt,
                "temperature": evaluation.temperature,
                "max_response_length": evaluation.max_response_length
                or inference.max_response_length,
                "max_context_length": spec.core.max_context_length,
                "dtype": inference.dtype,
                "seed": spec.data.seed,
            },
            "scoring": {"reward_zero_truncated": False},
        },
    )


def evaluation_key(tasks: tuple[dict[str, Any], ...]) -> str:
    """16 hex digits of the SHA-256 of the tasks as JSON: other settings, another receipt."""
    text = json.dumps(tasks, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARS]


def encoded(receipt: EvaluationReceipt) -> bytes:
    """The receipt as the content of its file."""
    return receipt.model_dump_json(indent=2).encode() + b"\n"


def read_receipt(store: Store, rel: str) -> EvaluationReceipt:
    """The receipt in ``rel``.

    Raises:
        FileNotFoundError: there is none.
        ContractViolation: the file is no receipt.
    """
    try:
        return EvaluationReceipt.model_validate_json(store.read_bytes(rel))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        reason = f"{field}: {first['msg']}" if field else first["msg"]
        raise ContractViolation(
            f"{store.root}/{rel} is not an evaluation receipt: {reason}"
        ) from error


def change_receipt(store: Store, rel: str, **changes: Any) -> EvaluationReceipt:
    """Replace fields of the receipt in ``rel``, atomically for readers."""
    receipt = read_receipt(store, rel).model_copy(update=changes)
    store.write_bytes(rel, encoded(receipt))
    return receipt


def receipts(store: Store) -> Iterator[tuple[str, EvaluationReceipt]]:
    """(path relative to the root, receipt) of every readable receipt, by update.

    Resubmissions follow what they repeat.
    """
    for rel in _named_like_receipts(store):
        with suppress(PerdureError, FileNotFoundError):
            yield rel, read_receipt(store, rel)


def damaged_receipts(store: Store) -> Iterator[str]:
    """Why each file that is named like a receipt and cannot be read is none."""
    for rel in _named_like_receipts(store):
        try:
            with suppress(FileNotFoundError):
                read_receipt(store, rel)
        except PerdureError as error:
            yield error.message


def _named_like_receipts(store: Store) -> list[str]:
    """Paths relative to the root, by update."""
    names = sorted(store.list(layout.EVALUATION), key=lambda name: name.removesuffix(".json"))
    return [f"{layout.EVALUATION}/{name}" for name in names if _NAME.fullmatch(name)]


def key_of(rel: str) -> str:
    """The key in a receipt's name.

    Raises:
        ContractViolation: it is not the name of a receipt.
    """
    found = _NAME.fullmatch(rel.rpartition("/")[2])
    if found is None:
        raise ContractViolation(f"{rel} is not the name of an evaluation receipt")
    return found[2]
