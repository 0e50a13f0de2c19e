"""Where every artifact lives, relative to the output root.

Names that people and dashboards know (``workflow.json``, ``prepared/``, ``rollouts/``,
``checkpoints/``) are those of the operations guide.
"""

import hashlib

from models.ids import FenceToken

WORKFLOW_JSON = "workflow.json"
"""State of the run, for readers without a Temporal server."""
PLAN_JSON = "plan.json"
RESOLVED_CONFIG = "run-spec.json"
"""The resolved run file; its digest is the run's identity."""
ATTEMPTS_JSON = "attempts.json"
FLEET_JSON = "fleet.json"
"""Newest life of every process of the run."""
REPORT = "report.html"
"""What ``perdure report`` writes: for people, read by nothing."""

PREPARED_REPORT = "prepared/report.json"
"""Written last: what ``prepared/`` holds and for which run file it was made."""
PREPARED_MODEL = "prepared/hf"
PREPARED_DATA = "prepared/data"
TRAIN_JSONL = "prepared/data/train.jsonl"
EVAL_JSONL = "prepared/data/eval.jsonl"
VERIFIERS_JSON = "prepared/data/verifiers.json"
MANIFEST_JSON = "prepared/data/manifest.json"
"""Written last in its folder: inputs, outputs and the part of the run file that made them."""

CHECKPOINT_FOLDERS = "checkpoints/core"
COMPLETE = "complete.json"
"""The completion marker, inside a checkpoint's folder."""
CURSOR = "cursor.json"
"""Cursor and ledger, inside a checkpoint's folder."""
LATEST = "checkpoints/core-latest.json"
"""Pointer for people; the newest valid marker wins over it."""

DRIVER_TIMING = "checkpoints/driver_timing.jsonl"
COMPILER_CACHE = "checkpoints/compiler_cache.jsonl"
TRAINER_RANKS = "checkpoints/trainer_ranks.jsonl"
"""Beginnings and ends of the processes of a trainer of several, but the first."""
METRICS = "checkpoints/metrics.jsonl"
PUBLICATION = "checkpoints/publication.jsonl"
ROLLOUT_ERRORS = "checkpoints/rollout_errors.jsonl"
UPDATES = "checkpoints/updates.jsonl"
"""One row a finished optimize: update, epoch, batch_sha256, policy_version."""

TRAINING_CONTRACT = "checkpoints/training_contract_rank0.jsonl"
"""What the trainer's first rank checked and measured, one event a line."""
PIPELINE_OCCUPANCY = "checkpoints/pipeline_occupancy.jsonl"
PIPELINE_LIFECYCLE = "checkpoints/pipeline_lifecycle.jsonl"
ROLLOUT_FLOW = "checkpoints/rollout_flow.jsonl"
ENGINE_OCCUPANCY = "checkpoints/engine_occupancy.jsonl"
"""Only failures to find the engines; each engine has a file of its own."""
ROLLING_PUBLICATION = "checkpoints/engine_drain.jsonl"
"""Events of a rolling publication, engine by engine."""

THROUGHPUT_ANALYSIS = "throughput-analysis.json"
CAPACITY_ANALYSIS = "capacity-analysis.json"
OCCUPANCY_ANALYSIS = "occupancy-analysis.json"

LINEAGE = "lineage"
"""Decisions on firings, in the root of a scheduled retraining."""
LATEST_EXPORT = "latest.json"
"""Which export to serve, in the root of a scheduled retraining."""
FIRING_PLAN = "firing.json"
"""Written last in a firing's folder: what it does."""

EVALUATION = "evaluation"
"""Receipts and results of background evaluations."""
EVAL_SNAPSHOTS = "eval-snapshots"

SNAPSHOT_COMPLETE = ".complete"
"""Empty, written last: the snapshot's folder holds every file."""
SNAPSHOT_FACTS = "snapshot.json"
"""Inside a snapshot's folder: which weights it holds."""
EVAL_PROVENANCE = "provenance.json"
"""Inside a folder of results: the inputs that they answer for."""
EVAL_SAMPLES = "samples.parquet"
EVAL_SCORES = "scores.json"
EVAL_STATE = "evaluation.json"
"""Inside a folder of results: ``complete`` or ``failed``."""
EVAL_PUBLICATION = "publication.json"
"""Inside a folder of results: whether trackers were told."""

ROLLOUTS = "rollouts"

REWOUND = "rewound"
"""One folder a rewind, named after its epoch, with what it set aside under its former path."""
REWIND_JSON = "rewind.json"
"""Inside such a folder: its exclusive creation is the rewind; the rest only follows from it."""
REWIND_SETTLED = "settled.json"
"""Inside such a folder, written last: everything that was undone is set aside."""

FORK_JSON = "fork.json"
"""In the root of a run that began at a checkpoint of another: which one."""

LEASE = "lease"
OWNER_JSON = "lease/owner.json"


def collection_parquet(update: int, epoch: int) -> str:
    """The samples of the collection of ``update``, committed under ``epoch``."""
    return f"{ROLLOUTS}/{update:07d}.e{epoch}.parquet"


def collection_manifest(update: int, epoch: int) -> str:
    """The file that makes ``collection_parquet`` count."""
    return f"{ROLLOUTS}/{update:07d}.e{epoch}.json"


def training_contract(rank: int) -> str:
    """What one rank of the trainer checked and measured, one event a line."""
    return f"checkpoints/training_contract_rank{rank}.jsonl"


def engine_occupancy(url: str) -> str:
    """Occupancy of the engine at ``url``."""
    return f"checkpoints/engine_occupancy_{hashlib.sha256(url.encode()).hexdigest()[:12]}.jsonl"


def sibling_timing(group_attempt: str) -> str:
    """Times of sibling samples; attempts are spread over files by their first hex digit."""
    return f"checkpoints/sibling_timing_{group_attempt[:1]}.jsonl"


def eval_snapshot(update: int) -> str:
    """The Hugging Face folder that a background evaluation of ``update`` updates reads."""
    return f"{EVAL_SNAPSHOTS}/update-{update:08d}/hf"


def eval_receipt(update: int, key: str) -> str:
    """The receipt of a background evaluation; its exclusive creation claims it."""
    return f"{EVALUATION}/update-{update:08d}-{key}.json"


def eval_reference(update: int) -> str:
    """Says where the weights of ``update`` lie when they were not copied."""
    return f"{EVAL_SNAPSHOTS}/update-{update:08d}/reference.json"


def eval_manual_receipt(receipt: str, group: str) -> str:
    """The receipt of a resubmission of ``receipt``."""
    return f"{receipt.removesuffix('.json').partition('-manual-')[0]}-manual-{group}.json"


def eval_results(receipt: str) -> str:
    """The folder of the results that ``receipt`` leads to."""
    return receipt.removesuffix(".json")


def eval_parquet(update: int, epoch: int) -> str:
    """The evaluated samples after ``update`` completed updates."""
    return f"{ROLLOUTS}/eval_{update:07d}.e{epoch}.parquet"


def checkpoint_folder(update: int, token: FenceToken) -> str:
    """A folder that no other attempt writes to, so a torn save never meets a retry."""
    return (
        f"{CHECKPOINT_FOLDERS}/rollout_{update:07d}.e{token.epoch}u{token.update}a{token.attempt}"
    )


def rewound_folder(epoch: int) -> str:
    """Where the rewind under ``epoch`` keeps what it undid."""
    return f"{REWOUND}/epoch-{epoch:08d}"


def epoch_file(epoch: int) -> str:
    """Its exclusive creation takes the epoch; its content is the owner."""
    return f"{LEASE}/epoch-{epoch:08d}.json"


def revoked_file(epoch: int) -> str:
    """Its existence revokes ``epoch`` and every lower one."""
    return f"{LEASE}/revoked-{epoch:08d}.json"


def firing_file(name: str, file: str) -> str:
    """A file of the firing ``name`` of a scheduled retraining."""
    return f"firings/{name}/{file}"


def firing_run(name: str) -> str:
    """The output root of the run of the firing ``name``, in the root of its retraining."""
    return f"runs/{name}"


def lineage_record(number: int) -> str:
    """The decision ``number``; its exclusive creation takes the number."""
    return f"{LINEAGE}/{number:08d}.json"
