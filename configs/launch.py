"""``[launch]``, ``[output]``, ``[tracking]``: where and under which limits a run lives."""

import re
from typing import Literal

from pydantic import Field, field_validator

from configs.credentials import names_credential
from configs.section import Section

_RESERVED = frozenset(
    (
        "RAY_ADDRESS",
        "PYTHONPATH",
        "CUDA_VISIBLE_DEVICES",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
)


class LaunchSection(Section):
    """``[launch]``."""

    fleet: str = Field(default="local", pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Which Ray cluster's workers run this: task queue ``perdure-fleet-<fleet>``."""
    auto_resume: bool = True
    """Continue from the newest committed checkpoint; off: an existing run is refused."""
    max_retries: int = Field(default=-1, ge=-1)
    """Starts after the first; -1: no cap."""
    max_recoveries: int = Field(default=20, ge=0)
    """Rebuilds in a row without a finished update before the run fails."""
    heartbeat_timeout_s: float = Field(default=4.0, ge=1)
    """A worker silent for this long is taken for dead and its activity goes to another."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline for model preparation and actor start, without download_timeout_s."""
    download_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time for the files of a component between a bucket and its host: the prepared model,
    a checkpoint, a snapshot. On top of startup_timeout_s and inference.start_timeout_s; a local
    output.root needs none of it."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Hard limit of the whole run in seconds, from its start, continued histories and rebuilds
    included: Temporal ends it then, where it is. Leave room above core.max_run_seconds. The same
    command resumes from the newest checkpoint, under a limit of its own."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the actors. Never changes what a run means; reserved names are refused."""

    @field_validator("env")
    @classmethod
    def _names_are_free(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if name in _RESERVED or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"environment name {name!r} is reserved or not an identifier")
            if names_credential(name):
                raise ValueError(
                    f"{name!r} looks like a credential; set it in the worker's environment instead"
                )
        return env


class OutputSection(Section):
    """``[output]``."""

    root: str = Field(min_length=1)
    """Output root: a folder, or a bucket (``s3://``, ``gs://``). A relative folder is relative to
    the current directory; every other path of a run file is relative to the run file's folder."""
    export_hf: bool = False
    """Write the final Hugging Face folder."""
    hf_dir: str = "export-hf"
    """Folder of the export, relative to the root."""


class TrackingSection(Section):
    """``[tracking]``: local JSONL always; W&B beside it."""

    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    """Offline files under ``wandb/`` can be synced later; a tracker failure never stops a run."""
    wandb_project: str = "perdure"
    """W&B project."""
    wandb_entity: str | None = None
    """W&B entity."""
