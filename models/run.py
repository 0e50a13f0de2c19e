"""A run: what starts it, what it carries from update to update, how it ends."""

from enum import StrEnum
from typing import Any

from pydantic import Field

from models.base import Carried, Frozen
from models.checkpoint import CheckpointRef, Rewind, RewindRequest
from models.evaluation import EvaluationReport, EvaluationSubmission
from models.ids import RunRef


class RunState(StrEnum):
    """Life of a run. ``stopped`` is resumable and is not a completion."""

    PREPARING = "preparing"
    TRAINING = "training"
    COMPLETE = "complete"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing runs any more in this state."""
        return self in (RunState.COMPLETE, RunState.FAILED, RunState.STOPPED)


class LoopPlan(Carried):
    """The facts of a run's configuration that decide the order of stages. Pure data."""

    num_rollouts: int
    """Updates of the whole run."""
    steps_per_update: int = 1
    """Optimizer steps per collection (K)."""
    max_policy_lag: int = 0
    """In optimizer steps; below K the loop is strictly sequential."""
    fully_async: bool = False
    """The producer samples by itself; a collection is taken in its turn, never ahead."""
    save_checkpoints: bool = True
    save_interval: int | None = None
    eval_interval: int | None = None
    eval_initial: bool = False
    eval_final: bool = False
    eval_background: bool = False
    """Evaluations run as workflows of their own, from snapshots."""
    eval_submit_timeout_s: float = 30.0
    publish_timeout_s: float | None = None
    """Deadline of one attempt at a publication that takes engine after engine."""
    export_hf: bool = False
    max_run_seconds: float | None = None
    continue_as_new_updates: int = 50
    max_recoveries: int = 20
    """Rebuilds in a row without a finished update before the run fails."""
    heartbeat_timeout_s: float = 4.0
    infra_timeout_multiplier: float = 1.0
    model_name: str = ""
    recipe_name: str = ""
    tracking: str = ""
    """Where W&B has the run's curves: a folder under the root, or a project; empty: nowhere."""


class StopRequest(Carried):
    """A user's or operator's wish to stop at the next boundary."""

    reason: str = ""
    checkpoint: bool = True
    restarts: bool = False
    """The run is started again at once: who waits for its end waits for that one's."""


class ClaimResult(Carried):
    """What ``claim`` found: the run may start, under this epoch, from there."""

    run: RunRef
    epoch: int
    plan: LoopPlan
    fleet_queue: str
    attempt: int = 0
    """0-based start of this run, as in ``attempts.json``."""
    checkpoint: CheckpointRef | None = None
    """The newest committed checkpoint, to resume from."""
    rewind: Rewind | None = None
    """What this start was asked to undo first, done."""
    started_unix: float = 0.0
    search_attributes: bool = False
    """Whether the server knows Perdure's search attributes; upserting unknown ones would wedge."""


class RunProgress(Carried):
    """The workflow's whole state; also the answer of the query ``progress``.

    Carried over continue-as-new: a few kilobytes, every field defaulted, counters and references
    only.
    """

    schema_version: int = 1
    run: RunRef | None = None
    state: RunState = RunState.PREPARING
    stage: str = "claim"
    """What the loop awaits now, e.g. ``optimize 12``."""
    attempt: int = 0
    epoch: int = 0
    plan: LoopPlan | None = None
    fleet_queue: str = ""
    search_attributes: bool = False
    next_update: int = 0
    """Updates finished so far, and the index of the next one."""
    policy_version: int = 0
    published_version: int = -1
    consumed_through: int = -1
    checkpoint: CheckpointRef | None = None
    rewind: Rewind | None = None
    """The rewind that this run began with."""
    evaluation: EvaluationReport | None = None
    last_evaluated_update: int = -1
    """Completed updates at the newest evaluation, finished or handed over."""
    submission: EvaluationSubmission | None = None
    """The newest background evaluation that was handed over."""
    paused: bool = False
    stop: StopRequest | None = None
    checkpoint_requests: int = 0
    """``checkpoint_now`` calls not yet served."""
    started_unix: float = 0.0
    training_started_unix: float | None = None
    """When preparing was over."""
    deadline_unix: float | None = None
    """The soft deadline: ``core.max_run_seconds`` after model and data were there."""
    finished_unix: float | None = None
    stopped_for_time: bool = False
    recoveries: int = 0
    """Rebuilds of this run, all of them."""
    recoveries_in_a_row: int = 0
    """Rebuilds since an update was finished that had never been finished before."""
    furthest_update: int = 0
    """The most updates that were ever finished; a rewind does not lower it."""
    updates_redone: int = 0
    chain_index: int = 0
    """How many times the run continued as new."""
    reward_first: float | None = None
    """Mean reward of the first collection."""
    reward_last: float | None = None
    reward_recent: tuple[float, ...] = ()
    """Mean rewards of the newest collections, at most 40, oldest first."""
    lag: int = 0
    tokens_per_second: float = 0.0
    seconds_per_update: float = 0.0
    first_update: int = 0
    """The update at which this attempt started (start_rollout_id)."""
    export_uri: str | None = None
    error: str | None = None
    error_type: str | None = None


class RunRequest(Carried):
    """Input of the ``Training`` workflow. Lenient on purpose: real validation is ``claim``'s.

    ``temporal workflow start --type Training --input-file run.json`` sends what
    ``perdure config render`` prints; anything wrong in it ends the run FAILED with the
    configuration error instead of a workflow task that fails for ever.
    """

    config: dict[str, Any] = Field(default_factory=dict)
    """The resolved run file."""
    config_sha256: str = ""
    """Optional; when given it must match ``config``."""
    config_path: str = ""
    """Where the run file came from, for messages only."""
    take_over: bool = False
    """Adopt an output root that another Temporal server owned."""
    rewind: RewindRequest | None = None
    """Go back to an earlier checkpoint first; what was done since is set aside."""
    progress: RunProgress | None = None
    """Set by continue-as-new only."""


class RunOutcome(Carried):
    """Result of the workflow, and of ``workflow.json``."""

    run_id: str
    state: RunState
    completed_rollout_ids: tuple[int, int] | None = None
    """First and last update finished by this attempt, both inclusive."""
    start_rollout_id: int = 0
    updates: int = 0
    policy_version: int = 0
    stopped_for_time: bool = False
    export_hf: str | None = None
    checkpoint: CheckpointRef | None = None
    evaluation: EvaluationReport | None = None
    submission: EvaluationSubmission | None = None
    error: str | None = None
    restarts: bool = False
    """Stopped by somebody who starts it again at once."""


class RecordRequest(Frozen):
    """Write ``workflow.json`` for the given progress, under the run's epoch."""

    progress: RunProgress


class RevokeRequest(Frozen):
    """Revoke ``epoch`` first, then (optionally) tear the fleet down."""

    run: RunRef
    epoch: int
    teardown: bool = True
    completed: bool = False
    """Whether the run reached its end: then what its processes compiled is published first."""


class PrepareRequest(Frozen):
    """Make model and data of a run ready and bring its fleet up under ``epoch``."""

    run: RunRef
    epoch: int
    checkpoint: CheckpointRef | None = None
    next_update: int = 0
    """The update that the workflow would do next; 0 on a fresh start."""
    resume_exactly: bool = False
    """Restore from ``checkpoint`` even when a live trainer could be kept (a rewind)."""


class PrepareReport(Frozen):
    """What is live after ``prepare``."""

    next_update: int
    policy_version: int
    consumed_through: int
    train_prompts: int = 0
    eval_prompts: int = 0
    model_parameters: int = 0
    rebuilt: tuple[str, ...] = ()
    """Components that were started rather than re-attached: trainer, producer, engine-0 ..."""
    seconds: float = 0.0
    fleet_seconds: float = 0.0
    """Of these, what the fleet took once model and data were there."""
