"""Evaluation and export."""

from enum import StrEnum

from pydantic import Field

from models.base import Carried, Frozen
from models.ids import RunRef


class EvaluateRequest(Frozen):
    """Evaluate the live policy on the held-out prompts."""

    run: RunRef
    epoch: int
    update: int
    """Completed updates: 0 is the initial policy."""
    policy_version: int
    phase: str
    """``initial``, ``periodic`` or ``final``."""


class EvaluationReport(Frozen):
    """Result of one evaluation; N prompts in, N x samples out, one policy version."""

    update: int
    policy_version: int
    name: str
    prompts: int
    samples: int
    reward_mean: float
    """Mean over samples with a score; errors are excluded and counted."""
    truncated_fraction: float
    error_fraction: float
    mean_response_tokens: float
    uri: str
    """Parquet file of the evaluated samples, relative to the output root."""
    sha256: str = ""
    """Of that file, in hex; empty in reports of versions that recorded none."""
    seconds: float
    metrics: dict[str, float] = Field(default_factory=dict)


class ReceiptStatus(StrEnum):
    """How far the submission of a background evaluation came."""

    CLAIMED = "claimed"
    PENDING = "pending"
    SUBMITTED = "submitted"
    SUBMISSION_FAILED = "submission_failed"
    SKIPPED_BUSY = "skipped_busy"
    """The evaluation before it was still running."""


class EvaluationSubmission(Carried):
    """What became of a background evaluation's submission."""

    update: int
    phase: str
    status: ReceiptStatus
    receipt: str = ""
    """Relative to the output root; empty when none could be claimed."""
    experiment_id: str = ""
    error_type: str = ""
    error: str = ""


class ExportRequest(Frozen):
    """Write the Hugging Face folder of the current policy."""

    run: RunRef
    epoch: int
    update: int
    policy_version: int


class ExportReport(Frozen):
    """A folder that transformers, SGLang and vLLM can load; re-loaded and compared already."""

    uri: str
    policy_version: int
    num_bytes: int
    num_parameters: int
    max_abs_logit_difference: float
    """Trainer against the re-loaded folder on probe tokens."""
    answer: str = ""
    """What the exported model says to one held-out question, greedily."""
    question: str = ""
    seconds: float
