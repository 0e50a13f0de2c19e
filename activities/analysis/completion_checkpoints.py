"""Whether every checkpoint that must be there is, each file by size and digest."""

from activities.analysis.completion import Check, Flaw, Root, file_flaws, numbers
from activities.storage import layout
from activities.storage.commit import SavedFolder, saved_folders

_OTHER = (
    "restore it from a copy, or remove the folder: a run then goes on from the checkpoint before"
)
_MARK = (
    "remove the folder: without its marker it is no checkpoint and is never resumed from; "
    "restore the marker only from a copy of this very folder"
)
_NONE = "restore the folder from a copy; a run that is not complete commits it when it goes on"


def expected_checkpoints(root: Root, found: set[int]) -> list[int]:
    """Updates whose checkpoint must still be there, by cadence and retention.

    ``found`` are updates that have one: those made on request count against what is kept.
    """
    plan, updates = root.plan, root.expected_updates
    if plan is None or root.spec is None or not updates or not plan.save_checkpoints:
        return []
    due = {updates - 1}
    if plan.save_interval is not None:
        first = max(0, root.forked_at - 1)
        due |= {u for u in range(first, updates) if (u + 1) % plan.save_interval == 0}
    core = root.spec.core
    every = core.checkpoint_keep_every
    newest = sorted(due | found, reverse=True)[: core.checkpoint_keep_last]
    kept = set(newest) | {u for u in due if every is not None and (u + 1) % every == 0}
    return sorted(due & (kept | {updates - 1}))


def check_checkpoints(root: Root) -> Check:
    """Whether each expected update has an intact checkpoint and none that is there is damaged."""
    folders = saved_folders(root.store)
    marked = {folder.update for folder in folders if folder.marker is not None}
    wanted = expected_checkpoints(root, marked)
    flaws: list[Flaw] = []
    files = num_bytes = 0
    for folder in folders:
        if folder.marker is None:
            flaws += _unmarked(root, folder, marked)
            continue
        files += len(folder.marker.files)
        num_bytes += sum(file.num_bytes for file in folder.marker.files)
        flaws += _damage(root, folder)
    present = marked | {folder.update for folder in folders}
    for update in wanted:
        if update not in present:
            where = root.path(layout.CHECKPOINT_FOLDERS)
            flaws.append(Flaw(where, f"no checkpoint after update {update}", _NONE))
    evidence = (
        f"{len(marked)} of updates {numbers(sorted(marked))}, expected {numbers(wanted)}; "
        f"{files} files, {num_bytes} bytes by SHA-256"
    )
    return Check("checkpoints", evidence, tuple(flaws))


def _unmarked(root: Root, folder: SavedFolder, marked: set[int]) -> list[Flaw]:
    """A save that was cut short is no flaw once its update is saved elsewhere."""
    if folder.update in marked:
        return []
    where = root.path(f"{folder.folder}/{layout.COMPLETE}")
    return [Flaw(where, f"{folder.fault}: the save was torn or the marker removed", _MARK)]


def _damage(root: Root, folder: SavedFolder) -> list[Flaw]:
    marker = folder.marker
    assert marker is not None
    flaws: list[Flaw] = []
    where = root.path(f"{folder.folder}/{layout.COMPLETE}")
    run_id = (root.state or {}).get("run_id")
    if run_id is not None and marker.run_id != run_id:
        problem = f"is a checkpoint of {marker.run_id}, not of {run_id}"
        flaws.append(Flaw(where, problem, "remove the folder, it belongs to another run"))
    if marker.clock.next_rollout_id != folder.update + 1:
        problem = f"says that update {marker.clock.next_rollout_id} is next"
        flaws.append(Flaw(where, problem, _OTHER))
    for file in marker.files:
        rel = f"{folder.folder}/{file.path}"
        flaws += file_flaws(root, rel, file.num_bytes, file.sha256, _OTHER)
    return flaws
