"""Scheduled retraining: the request, the plan of a firing, its decision, its record."""

from enum import StrEnum
from typing import Any

from pydantic import Field

from models.base import Carried, Frozen
from models.checkpoint import CheckpointRef
from models.run import RunRequest

METRICS: dict[str, bool] = {
    "eval/heldout": True,
    "eval/heldout-truncated_ratio": False,
    "eval/heldout-none_reward_ratio": False,
    "eval/heldout/invalid_fraction": False,
}
"""What a promotion may be decided by -> whether more is better."""
UNSCORED = "eval/heldout-none_reward_ratio"
"""Share of held-out samples that no verifier could score."""


class RetrainingRequest(Carried):
    """Input of the ``Retraining`` workflow. Lenient: real validation is that of its first activity.

    ``temporal schedule create --type Retraining --input-file`` takes what
    ``perdure schedule render`` prints.
    """

    config: dict[str, Any] = Field(default_factory=dict)
    """The resolved run file of every firing; its ``output.root`` is the root of the retraining."""
    config_sha256: str = ""
    """Optional; when given it must match ``config``."""
    config_path: str = ""
    """Where the run file came from, for messages only."""
    data: tuple[str, ...] = ()
    """Absolute paths or fsspec URLs with ``*``, ``?`` and ``[]``: where new prompts appear."""
    metric: str = "eval/heldout"
    """Which figure of the held-out evaluation decides."""
    tolerance: float = 0.0
    """How much worse than its parent a candidate may be; below 0, how much better it must be."""
    max_unscored_fraction: float = 0.0
    """Largest share of held-out samples without a score that an evaluation may have."""


class Decision(StrEnum):
    """How a firing ended."""

    PROMOTED = "promoted"
    REFUSED = "refused"
    FAILED = "failed"
    """The training did not complete; its data stay new."""
    NOTHING_TO_DO = "nothing_to_do"
    """No new data; nothing was trained and nothing is recorded."""

    @property
    def is_final(self) -> bool:
        """Whether the firing's data count as used and a retry of it changes nothing."""
        return self in (Decision.PROMOTED, Decision.REFUSED)


class DataFile(Carried):
    """One chosen file."""

    url: str
    num_bytes: int
    sha256: str
    rows: int


class DataChoice(Carried):
    """The new data of a firing."""

    path: str
    """The chosen files' rows in one JSONL file, in the order of their addresses."""
    sha256: str
    """Of that file: also in the run's ``prepared/data/manifest.json``."""
    rows: int
    files: tuple[DataFile, ...]


class Parent(Carried):
    """The weights that a firing starts from."""

    source: str
    """Export folder of a promoted run; of the first firing the run file's ``model.source``."""
    digest: str = ""
    """Of the folder; of the first firing, the prepared model's, known after the training."""
    run_id: str = ""
    """The run that made it; empty for the first firing."""
    record: int = 0
    """Number of its record in the lineage; 0 for the first firing."""


class FileDigest(Carried):
    """One file of an export."""

    path: str
    """Relative to the folder."""
    num_bytes: int
    sha256: str


class FolderDigest(Carried):
    """A folder and what is in it."""

    path: str
    digest: str
    """SHA-256 of the lines ``SHA256  PATH`` of its files by path: of ``sha256sum *`` in it."""
    files: tuple[FileDigest, ...]


class Comparison(Carried):
    """Two evaluations on the same held-out prompts, by the same run with the same engine."""

    metric: str
    higher_is_better: bool
    tolerance: float
    parent: float | None
    """Of the run's initial evaluation: the weights that it started from; None: there is none."""
    candidate: float | None
    """Of its final one."""
    samples: int = 0
    """Held-out samples of each evaluation."""
    updates: int
    """Completed updates at the final one."""
    max_unscored_fraction: float
    parent_unscored: float | None
    candidate_unscored: float | None
    data_sha256: str
    """Of the prepared held-out prompts."""


class FiringRequest(Frozen):
    """Plan the firing that this workflow is."""

    request: RetrainingRequest
    workflow_id: str


class FiringPlan(Carried):
    """What a firing does, fixed once: whoever repeats it finds the same."""

    name: str
    """Name of the run, and of the firing."""
    root: str
    """Of the retraining."""
    run_root: str
    data: DataChoice
    parent: Parent
    request_sha256: str
    """Digest of what the firing was asked for."""
    num_rollouts: int
    timeout_s: float | None = None
    """Hard limit of the run; see ``launch.timeout_s``."""
    identity_sha256: str
    """What the run means; see ``configs.load.Loaded.identity``."""
    training: RunRequest
    """Input of the run."""

    @property
    def run_id(self) -> str:
        """Workflow id of the run."""
        return f"train/{self.name}"


class RetrainingOutcome(Carried):
    """Result of the ``Retraining`` workflow."""

    firing: str
    decision: Decision
    reason: str
    """With the numbers that decided."""
    run_id: str = ""
    record: int = 0
    """Number in the lineage; 0: nothing was recorded."""
    export: str = ""
    """Folder of the promoted model."""
    comparison: Comparison | None = None


class Firing(Frozen):
    """Answer of ``plan_firing``: a plan, or an outcome when there is nothing left to train."""

    plan: FiringPlan | None = None
    is_trained: bool = False
    """The run is complete already: a repeated firing goes on to the decision."""
    outcome: RetrainingOutcome | None = None


class DecideRequest(Frozen):
    """Decide on a firing whose run ended."""

    request: RetrainingRequest
    plan: FiringPlan
    error: str = ""
    """How the run failed; empty when it did not."""


class LineageRecord(Carried):
    """One decision, one immutable file."""

    schema_version: int = 1
    number: int
    """From 1, without gaps; its exclusive creation orders the decisions."""
    firing: str
    run_id: str
    run_root: str
    decision: Decision
    reason: str
    config_sha256: str
    """Of the run's resolved run file."""
    data: DataChoice
    parent: Parent
    checkpoint: CheckpointRef | None = None
    export: FolderDigest | None = None
    comparison: Comparison | None = None
    recorded_unix: float


class LatestPointer(Carried):
    """``latest.json``: the export to serve."""

    schema_version: int = 1
    export: str
    """Absolute folder."""
    digest: str
    files: tuple[FileDigest, ...]
    run_id: str
    firing: str
    record: int
    metric: str
    value: float
    promoted_unix: float
