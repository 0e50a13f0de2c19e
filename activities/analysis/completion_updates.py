"""Whether every update was trained on an intact collection, published, and accounted for."""

from collections.abc import Iterator

from activities.analysis.audit import audit
from activities.analysis.completion import Check, Flaw, Root, file_flaws, numbers
from activities.storage import layout
from activities.storage.rewinds import is_settled

_RESUME = (
    "restore it from a copy; a run that is not complete does what is missing when the same "
    "`perdure run` goes on"
)
_FINISH = "the next `perdure run` of this run finishes it"
_COPY = "restore it from a copy; what this update was trained on is not proved without it"


def check_updates(root: Root) -> Check:
    """Whether all expected updates stand in the final line, each with its row."""
    where, expected = root.path(layout.UPDATES), root.expected_updates
    found = [each.update for each in root.line.updates]
    evidence = f"{len(found)} of {'?' if expected is None else expected}"
    if found and root.line.updates[-1].policy_version is not None:
        evidence += f", policy version {root.line.updates[-1].policy_version}"
    if root.line.redone:
        evidence += f", {root.line.redone} redone after a rebuild"
    if root.forked_at:
        evidence += f", the first {root.forked_at} by the run that it was forked from"
    flaws = []
    for rewind in root.evidence.rewinds:
        evidence += f", rewound to {rewind.updates} under epoch {rewind.epoch}"
        if not is_settled(root.store, rewind):
            record = root.path(layout.rewound_folder(rewind.epoch))
            flaws.append(Flaw(record, "what the rewind undid is not set aside yet", _FINISH))
    if expected is None:
        problem = "the expected number is unknown: the recorded run file cannot be read"
        remedy = f"restore {root.path(layout.RESOLVED_CONFIG)}"
        return Check("updates", evidence, (*flaws, Flaw(where, problem, remedy)))
    unrecorded = [u for u in found if not root.line.updates[u].recorded and not _lost(root, u)]
    missing = sorted({*range(len(found), expected), *unrecorded})
    if missing:
        flaws.append(Flaw(where, f"no row of updates {numbers(missing)}", _RESUME))
    if len(found) > expected:
        problem = f"{len(found) - expected} updates more than the run file asks for"
        flaws.append(Flaw(where, problem, "compare the run file with the one that ran"))
    return Check("updates", evidence, tuple(flaws))


def _lost(root: Root, update: int) -> bool:
    """Whether the report of ``update`` was lost with its worker: a later epoch began behind it."""
    own = root.line.updates[update].epoch
    starts: dict[int, int] = {}
    places = [(row.update, row.epoch) for row in root.evidence.rows]
    places += [(rewind.updates, rewind.epoch) for rewind in root.evidence.rewinds]
    for place, epoch in (*places, *root.evidence.manifests):
        starts[epoch] = min(place, starts.get(epoch, place))
    return own is not None and any(
        epoch > own and start == update + 1 for epoch, start in starts.items()
    )


def check_collections(root: Root) -> Check:
    """Whether the collection of each update has its manifest and the recorded digest."""
    flaws: list[Flaw] = []
    samples = 0
    for each in root.line.updates:
        if each.manifest is None:
            rel = layout.collection_manifest(each.update, each.epoch or 0)
            problem = f"missing: the marker of the collection of update {each.update}"
            flaws.append(Flaw(root.path(rel), problem, _COPY))
            continue
        collection = each.manifest.collection
        samples += collection.counts.samples
        flaws += file_flaws(root, collection.uri, None, collection.sha256, _COPY)
    count = sum(each.manifest is not None for each in root.line.updates)
    return Check("collections", f"{count} with {samples} samples, by SHA-256", tuple(flaws))


def check_publication(root: Root) -> Check:
    """Whether the last policy version reached the engines."""
    versions = list(_versions(root))
    last = root.line.updates[-1].policy_version if root.line.updates else None
    evidence = f"{len(versions)} publications, newest version {max(versions, default=None)}"
    if last is None or last in versions:
        return Check("publication", evidence)
    where = root.path(layout.PUBLICATION)
    problem = f"no publication of version {last}, which the last update made"
    return Check("publication", evidence, (Flaw(where, problem, _RESUME),))


def _versions(root: Root) -> Iterator[int]:
    for row in root.store.read_jsonl(layout.PUBLICATION).rows:
        if isinstance(row.get("version"), int):
            yield row["version"]


def check_accounting(root: Root) -> Check:
    """Whether every prompt that was drawn is accounted for."""
    books = audit(root.store.root)
    if books.is_clean:
        return Check("prompts", books.verdict)
    remedy = f"see which: perdure audit {root.store.root} --prompts"
    return Check("prompts", books.verdict, (Flaw(root.store.root, books.verdict, remedy),))
