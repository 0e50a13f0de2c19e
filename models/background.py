"""Background evaluation: a snapshot of the weights, a receipt, a child workflow of its own."""

from typing import Any

from pydantic import Field

from models.base import Carried, Frozen
from models.evaluation import EvaluationSubmission, ReceiptStatus
from models.ids import RunRef
from models.run import LoopPlan


class SnapshotRequest(Frozen):
    """Store the weights of ``policy_version`` where an evaluation can read them later."""

    run: RunRef
    epoch: int
    update: int
    """Completed updates."""
    policy_version: int


class SnapshotRef(Carried):
    """A Hugging Face folder under the output root, complete and unchanging."""

    update: int
    policy_version: int
    folder: str
    """Relative to the output root."""
    digest: str
    """``WeightsRef.digest`` of the tensors: what an engine that loaded them must answer."""
    num_bytes: int


class SubmitRequest(Frozen):
    """Claim the receipt of one evaluation, or learn that somebody has."""

    run: RunRef
    epoch: int
    phase: str
    """``initial``, ``periodic`` or ``final``."""
    snapshot: SnapshotRef


class BackgroundOrder(Carried):
    """Input of the workflow ``BackgroundEvaluation``."""

    run: RunRef
    receipt: str
    """Relative to the output root; names the folder of the results as well."""
    experiment_id: str
    """Id of the workflow; fixed in the receipt before it is started, so it starts once."""
    phase: str
    snapshot: SnapshotRef
    after: str | None = None
    """Id of an evaluation to wait for."""
    timeout_s: float
    """Deadline of one attempt, its engine's start included."""
    plan: LoopPlan
    """The run's, for time-outs."""


class EvaluationClaim(Frozen):
    """Answer to ``SubmitRequest``: the order to start, or the state that makes it needless."""

    submission: EvaluationSubmission
    order: BackgroundOrder | None = None


class SubmissionRecord(Frozen):
    """How a submission ended. Creates the receipt when claiming it failed already."""

    run: RunRef
    submission: EvaluationSubmission
    snapshot: SnapshotRef | None = None
    """What it was to evaluate, once that is stored: enough to submit it again by hand."""


class EvaluationFailure(Frozen):
    """An evaluation that will not be tried again."""

    order: BackgroundOrder
    error_type: str
    error: str


class EvaluationReceipt(Carried):
    """Content of ``evaluation/update-NNNNNNNN-KEY.json``. Its first creation claims it."""

    schema_version: int = 1
    update: int
    status: ReceiptStatus
    experiment_id: str = ""
    """Workflow id of the evaluation."""
    checkpoint: str = ""
    """Absolute path or URL of the snapshot's Hugging Face folder."""
    tasks: tuple[dict[str, Any], ...] = ()
    """What is sampled and how it is scored; its digest is the receipt's key."""
    group_id: str = ""
    """The key, or for a resubmission a number of its own."""
    evaluation: dict[str, Any] = Field(default_factory=dict)
    """The run file's ``[evaluation]``."""
    training: dict[str, Any] = Field(default_factory=dict)
    """``name``, ``root``, ``run_id``, ``spec_sha256`` of the run."""
    code_sha256: str = ""
    """Version and source digest of the code that claimed it."""
    phase: str = ""
    snapshot: SnapshotRef | None = None
    resubmission_of: str | None = None
    error: dict[str, str] | None = None
    """``type`` and ``message`` of what kept it from being submitted."""
    result: dict[str, Any] | None = None
    """``status`` complete or failed, ``folder`` of the results, mean ``reward`` or ``error``."""
