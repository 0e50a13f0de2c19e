"""Records of rewinds: which work of a run does not count any more.

A rewind exists from the exclusive creation of its record on, ``rewind.json`` in
``rewound/epoch-NNNNNNNN/``, under an epoch that was claimed for it. From then on every reader
passes over what older epochs did at its first undone update or later, wherever those files lie.
"""

import re
from collections.abc import Sequence

from activities.storage import layout
from activities.storage.lease import require_epoch
from activities.storage.store import Store
from models.checkpoint import Rewind
from models.errors import ContractViolation

_FOLDER = re.compile(r"epoch-(\d{8,})")


def read_rewinds(store: Store) -> list[Rewind]:
    """Every rewind of the root, oldest first.

    Raises:
        ContractViolation: a record cannot be read: nobody knows then which work counts.
    """
    found = []
    for name in store.list(layout.REWOUND):
        match = _FOLDER.fullmatch(name)
        rel = f"{layout.REWOUND}/{name}/{layout.REWIND_JSON}"
        if match is None or not store.exists(rel):
            continue
        try:
            found.append(Rewind.model_validate_json(store.read_bytes(rel)))
        except ValueError as error:
            reason = " ".join(str(error).split("\n")[:2])
            raise ContractViolation(
                f"{store.root}/{rel} is not the record of a rewind ({reason}); restore it from a "
                "copy: without it nobody knows which updates count"
            ) from error
    return sorted(found, key=lambda rewind: rewind.epoch)


def is_undone(rewinds: Sequence[Rewind], update: int, epoch: int) -> bool:
    """Whether a rewind undid what ``epoch`` did as update ``update``."""
    return any(epoch < each.epoch and update >= each.updates for each in rewinds)


def is_settled(store: Store, rewind: Rewind) -> bool:
    """Whether everything that ``rewind`` undid has been set aside."""
    return store.exists(f"{layout.rewound_folder(rewind.epoch)}/{layout.REWIND_SETTLED}")


def has_unsettled(store: Store) -> bool:
    """Whether a kill came between a rewind and the moving of what it undid."""
    return any(not is_settled(store, rewind) for rewind in read_rewinds(store))


def record_rewind(store: Store, rewind: Rewind) -> None:
    """Make ``rewind`` count, at once and for every reader.

    Raises:
        StaleFence: its epoch does not own the root any more.
    """
    require_epoch(store, rewind.epoch)
    rel = f"{layout.rewound_folder(rewind.epoch)}/{layout.REWIND_JSON}"
    store.create_exclusive(rel, rewind.model_dump_json(indent=2).encode() + b"\n")
