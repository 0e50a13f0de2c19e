"""Receipts of background evaluations as the command line shows and renews them."""

import asyncio
import secrets
import shlex
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from temporalio.common import WorkflowIDReusePolicy
from temporalio.service import RPCError

from activities.background.receipts import (
    COMPLETE,
    change_receipt,
    damaged_receipts,
    encoded,
    key_of,
    read_receipt,
    receipts,
)
from activities.background.submit import new_experiment_id, order_of
from activities.multiplier import infra_timeout_multiplier
from activities.queues import fleet_queue
from activities.site import spec_of
from activities.storage import layout
from activities.storage.store import Store
from configs.run import RunSpec
from models.background import BackgroundOrder, EvaluationReceipt
from models.errors import ConfigurationError, ContractViolation
from models.evaluation import EvaluationSubmission, ReceiptStatus
from models.ids import RunRef
from workers.cli.place import Place
from workers.cli.server import RPC_TIMEOUT, connect_to
from workers.source_digest import source_digest
from workflows.background import WORKFLOW_TYPE

GROUP_BYTES = 8


@dataclass(frozen=True, slots=True)
class Resubmission:
    """A new receipt that is not written yet, and what to start for it."""

    spec: RunSpec
    receipt: EvaluationReceipt
    order: BackgroundOrder

    @property
    def experiment_id(self) -> str:
        """Id of the workflow to start."""
        return self.order.experiment_id


def summaries(root: str) -> list[dict[str, Any]]:
    """One row a receipt, by update.

    Raises:
        ConfigurationError: there is no such root.
    """
    store = Store(root)
    if not store.exists(""):
        raise ConfigurationError(
            f"{root} does not exist; give the run file, or the folder that its output.root names"
        )
    return [_summary(rel, receipt) for rel, receipt in receipts(store)]


def damaged(root: str) -> list[str]:
    """Why files that are named like receipts are left out of ``summaries``."""
    return list(damaged_receipts(Store(root)))


def state_of(summary: dict[str, Any]) -> str:
    """The one word that says most: the result's state if there is one, else the submission's."""
    return str(summary["result"] or summary["status"])


def show_receipts(console: Console, root: str, found: list[dict[str, Any]]) -> None:
    """A line a receipt, and what to do about those that did not come to a result."""

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    if not found:
        line(f"no background evaluation was submitted for {root}")
        return
    form = "{:>6}  {:<8}  {:<17}  {:>6}  {}"
    line(form.format("update", "phase", "state", "reward", "receipt"))
    for row in found:
        reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
        line(form.format(row["update"], row["phase"], state_of(row), reward, row["receipt"]))
    settled = {row["update"] for row in found if row["result"] == COMPLETE}
    undone = [row for row in found if row["update"] not in settled and row["error"]]
    for row in undone:
        line(f"update {row['update']}: {row['error']}")
    if undone:
        path = shlex.quote(f"{root.rstrip('/')}/{undone[-1]['receipt']}")
        line(f"submit again: perdure evaluation resubmit {path}")


def prepare_resubmission(path: str) -> Resubmission:
    """Read the receipt at ``path`` and make another one for its snapshot.

    Raises:
        ConfigurationError: it is no receipt, or its snapshot is gone or was never complete.
    """
    root, name = _split(path)
    store, rel = Store(root), f"{layout.EVALUATION}/{name}"
    try:
        key_of(rel)
        before = read_receipt(store, rel)
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path} does not exist; list what there is: perdure evaluation list {root}"
        ) from None
    except ContractViolation as error:
        raise ConfigurationError(error.message) from None
    _require_snapshot(store, path, before)
    run = RunRef(
        run_id=before.training["run_id"],
        root=store.root,
        spec_sha256=before.training["spec_sha256"],
    )
    spec, group_id = spec_of(run), secrets.token_hex(GROUP_BYTES)
    renamed = layout.eval_manual_receipt(rel, group_id)
    receipt = before.model_copy(
        update={
            "status": ReceiptStatus.PENDING,
            "experiment_id": new_experiment_id(run.run_id, renamed),
            "group_id": group_id,
            "training": {"name": spec.name, **run.model_dump(mode="json")},
            "code_sha256": source_digest(),
            "resubmission_of": rel,
            "error": None,
            "result": None,
        }
    )
    order = order_of(spec, renamed, receipt, None, infra_timeout_multiplier())
    return Resubmission(spec, receipt, order)


async def submit(place: Place, resubmission: Resubmission) -> EvaluationSubmission:
    """Write the receipt, start the workflow, and write how that went.

    Raises:
        ServiceUnreachable: no server answered; nothing was written.
    """
    client = await connect_to(place)
    order, spec = resubmission.order, resubmission.spec
    store = Store(order.run.root)
    await asyncio.to_thread(store.write_bytes, order.receipt, encoded(resubmission.receipt))
    submission = EvaluationSubmission(
        update=order.snapshot.update,
        phase=order.phase,
        status=ReceiptStatus.SUBMITTED,
        receipt=order.receipt,
        experiment_id=order.experiment_id,
    )
    try:
        async with asyncio.timeout(spec.evaluation.submit_timeout_s):
            await client.start_workflow(
                WORKFLOW_TYPE,
                order,
                id=order.experiment_id,
                task_queue=fleet_queue(spec.launch.fleet),
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                static_summary=f"resubmitted evaluation after update {order.snapshot.update}",
                rpc_timeout=RPC_TIMEOUT,
            )
    except (RPCError, TimeoutError) as error:
        submission = submission.model_copy(
            update={
                "status": ReceiptStatus.SUBMISSION_FAILED,
                "error_type": type(error).__name__,
                "error": str(error) or "no answer in time",
            }
        )
    await asyncio.to_thread(_record, store, submission)
    return submission


def _record(store: Store, submission: EvaluationSubmission) -> None:
    """The evaluation may be faster than this process: what it wrote stays."""
    if read_receipt(store, submission.receipt).status is not ReceiptStatus.PENDING:
        return
    error = {"type": submission.error_type, "message": submission.error}
    change_receipt(
        store,
        submission.receipt,
        status=submission.status,
        error=error if submission.error_type else None,
    )


def _split(path: str) -> tuple[str, str]:
    """Output root and file name of a receipt's path or URL."""
    folder, _, name = path.rpartition("/")
    root, _, last = (folder or ".").rpartition("/")
    if not name or (last or folder) != layout.EVALUATION:
        raise ConfigurationError(
            f"{path} is not the path of a receipt; give ROOT/{layout.EVALUATION}/update-...json"
        )
    return root or ".", name


def _require_snapshot(store: Store, path: str, receipt: EvaluationReceipt) -> None:
    snapshot = receipt.snapshot
    if snapshot is None or not {"run_id", "spec_sha256"} <= receipt.training.keys():
        raise ConfigurationError(
            f"{path} names no snapshot: its submission failed before there was one, so there is "
            "nothing to evaluate"
        )
    marker = f"{snapshot.folder}/{layout.SNAPSHOT_COMPLETE}"
    if snapshot.update and not store.exists(marker):
        raise ConfigurationError(
            f"{store.root}/{snapshot.folder} has no {layout.SNAPSHOT_COMPLETE}: the snapshot was "
            "deleted or never finished; resubmit the receipt of a newer update"
        )


def _summary(rel: str, receipt: EvaluationReceipt) -> dict[str, Any]:
    result = receipt.result or {}
    error = receipt.error or {}
    return {
        "update": receipt.update,
        "phase": receipt.phase,
        "status": receipt.status.value,
        "result": result.get("status"),
        "reward": result.get("reward"),
        "error": result.get("error") or (f"{error['type']}: {error['message']}" if error else None),
        "receipt": rel,
        "folder": result.get("folder"),
        "experiment_id": receipt.experiment_id,
        "resubmission_of": receipt.resubmission_of,
    }
