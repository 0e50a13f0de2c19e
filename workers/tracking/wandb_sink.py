"""W&B beside the run's own files: one W&B run a Perdure run, offline unless asked otherwise.

Offline files appear under ``<output root>/wandb/`` and can be sent later with ``wandb sync``.
Each metric is plotted against the axis that ``models/metrics.py`` declares for it.
"""

import hashlib
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import structlog

from activities.storage.store import Store
from configs.run import RunSpec
from models.ids import RunRef
from models.metrics import METRICS
from workers.tracking.background import MAX_QUEUED_ROWS, BackgroundTracker

INIT_TIMEOUT_S = 30.0
REOPEN_AFTER_S = 300.0
"""A W&B run that could not be opened is not tried again sooner: opening may cost its time-out."""

_log = structlog.get_logger(__name__)


class WandbUnavailable(RuntimeError):
    """A W&B run could not be opened a moment ago; its rows are counted as failed meanwhile."""


class WandbSink(BackgroundTracker):
    """Copies metrics to W&B. Holds one open W&B run for each Perdure run that logs here."""

    def __init__(
        self,
        load_spec: Callable[[RunRef], RunSpec],
        *,
        backend: ModuleType | Any | None = None,
        max_queued_rows: int = MAX_QUEUED_ROWS,
    ) -> None:
        """``load_spec`` gives a run's resolved configuration; ``backend`` stands in for wandb."""
        super().__init__("wandb", max_queued_rows)
        self._load_spec = load_spec
        self._backend = backend
        self._open_runs: dict[tuple[str, str], Any] = {}  # None: tracking is disabled for the run
        self._retry_at: dict[tuple[str, str], float] = {}

    def _record(self, run: RunRef, metrics: Mapping[str, float]) -> None:
        key = (run.run_id, run.root)
        if key not in self._open_runs:
            if time.monotonic() < self._retry_at.get(key, 0.0):
                raise WandbUnavailable(run.run_id)
            self._retry_at[key] = time.monotonic() + REOPEN_AFTER_S
            self._open_runs[key] = self._open(run, self._load_spec(run))
        tracked = self._open_runs[key]
        if tracked is not None:
            tracked.log(dict(metrics))

    def _finish(self) -> None:
        open_runs = [tracked for tracked in self._open_runs.values() if tracked is not None]
        with ExitStack() as stack:  # every one is finished, also after one that fails
            if open_runs:
                stack.callback(self._wandb().teardown)
            for tracked in open_runs:
                stack.callback(tracked.finish)

    def _open(self, run: RunRef, spec: RunSpec) -> Any:
        """A new W&B run with the declared axes, or None when tracking is disabled."""
        tracking = spec.tracking
        if tracking.wandb_mode == "disabled":
            return None
        wandb = self._wandb()
        tracked = wandb.init(
            id=wandb_run_id(run),
            name=spec.name,
            project=tracking.wandb_project,
            entity=tracking.wandb_entity,
            mode=tracking.wandb_mode,
            resume="allow",
            reinit="create_new",
            dir=_folder(run),
            config={**spec.model_dump(mode="json"), "spec_sha256": run.spec_sha256},
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                init_timeout=INIT_TIMEOUT_S,
                save_code=False,
                silent=True,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )
        for prefix, axis in metric_axes().items():
            tracked.define_metric(axis)
            tracked.define_metric(f"{prefix}/*", step_metric=axis)
        return tracked

    def _wandb(self) -> Any:
        """The wandb module, imported on first use: it is slow and a disabled run needs none."""
        if self._backend is None:
            import wandb

            self._backend = wandb
        return self._backend


def wandb_run_id(run: RunRef) -> str:
    """The same 16 hex digits for the same run, from whichever process and attempt."""
    return hashlib.sha256(f"{run.run_id}\n{run.root}".encode()).hexdigest()[:16]


def metric_axes() -> dict[str, str]:
    """First part of a metric's name -> the axis of all metrics that begin so."""
    return {metric.name.split("/", 1)[0]: metric.axis for metric in METRICS}


def _folder(run: RunRef) -> str:
    """Where W&B makes its ``wandb/`` folder: the root, or a scratch folder for a remote root."""
    store = Store(run.root)
    if store.is_local:
        return store.root
    scratch = tempfile.mkdtemp(prefix="perdure-wandb-")
    _log.warning("output root is not local, W&B files stay here", run=run.run_id, folder=scratch)
    return scratch
