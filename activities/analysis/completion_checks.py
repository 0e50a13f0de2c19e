"""All checks of a run's root, in the order in which people read them."""

from dataclasses import dataclass

from activities.analysis.completion import Check, read_root
from activities.analysis.completion_checkpoints import check_checkpoints
from activities.analysis.completion_evaluations import check_evaluations
from activities.analysis.completion_export import check_export
from activities.analysis.completion_identity import (
    check_owner,
    check_prepared,
    check_run_file,
    check_state,
)
from activities.analysis.completion_updates import (
    check_accounting,
    check_collections,
    check_publication,
    check_updates,
)
from configs.load import Loaded


@dataclass(frozen=True, slots=True)
class Verification:
    """What the files of a run prove."""

    root: str
    run_id: str
    checks: tuple[Check, ...]
    export: str | None
    """Folder of a finished export, relative to the root; none when there is nothing to load."""

    @property
    def is_complete(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.checks)


def verify(root: str, *, run_id: str | None = None, loaded: Loaded | None = None) -> Verification:
    """Check the run under ``root`` (a folder or a URL) against what it recorded, and ``loaded``.

    Args:
        root: the output root.
        run_id: whose root it should be; none: whoever it belongs to.
        loaded: the run file at hand; none: only the recorded one counts.

    Raises:
        ConfigurationError: ``root`` holds no run.
    """
    read = read_root(root)
    export = check_export(read)
    checks = (
        check_owner(read, run_id),
        check_run_file(read, loaded),
        check_state(read),
        check_prepared(read),
        check_updates(read),
        check_collections(read),
        check_publication(read),
        check_evaluations(read),
        check_checkpoints(read),
        check_accounting(read),
        export,
    )
    asked = read.spec is not None and read.spec.output.export_hf
    folder = read.spec.output.hf_dir if read.spec is not None and asked and export.holds else None
    named = str((read.state or {}).get("run_id") or run_id or "")
    return Verification(read.store.root, named, checks, folder)
