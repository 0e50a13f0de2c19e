"""Who owns an output root, and under which epoch. No lock files, nothing to delete by hand.

``lease/owner.json`` names the run that the root belongs to. ``lease/epoch-NNNNNNNN.json`` is
created exclusively: the creation is the compare-and-swap that takes the epoch, so concurrent
claimers get different ones and the highest wins. ``lease/revoked-NNNNNNNN.json`` ends an epoch for
ever. Nothing of it depends on a living process, so a killed machine leaves nothing behind that
blocks the next start.
"""

import re
import time
from datetime import UTC, datetime

from activities.storage import layout
from activities.storage.store import Store
from models.base import Carried
from models.errors import ContractViolation, OwnershipError, StaleFence

_EPOCH = re.compile(r"epoch-(\d{8,})\.json")
_REVOKED = re.compile(r"revoked-(\d{8,})\.json")


class Owner(Carried):
    """A claimer: run, namespace and server are its identity, the other fields are for people."""

    run_id: str
    """The Temporal workflow id."""
    namespace: str
    """Temporal namespace."""
    cluster_id: str
    """The Temporal server's own id; two servers may run workflows of the same id."""
    workflow_run_id: str = ""
    host: str = ""
    pid: int = 0
    address: str = ""
    """Where the Temporal server listens, as the claimer knew it."""

    def same_run(self, other: "Owner") -> bool:
        """Whether both are the same run on the same server; host, pid and address may differ."""
        return (self.run_id, self.namespace, self.cluster_id) == (
            other.run_id,
            other.namespace,
            other.cluster_id,
        )


class Claim(Carried):
    """Content of ``owner.json`` and of every epoch file."""

    owner: Owner
    claimed_unix: float
    epoch: int = 0
    """0 in ``owner.json``."""


def claim_epoch(store: Store, owner: Owner, *, take_over: bool = False) -> int:
    """Take the next epoch of the root for ``owner``; epochs start at 1 and never repeat.

    The same run may claim again and again. Another run, or the same id on another Temporal server,
    is refused with ``OwnershipError`` unless ``take_over`` adopts the root.
    """
    _settle_owner(store, owner, take_over)
    epoch = current_epoch(store) + 1
    while not store.create_exclusive(layout.epoch_file(epoch), _encoded(owner, epoch)):
        epoch += 1
    holder = read_owner(store)
    if holder is None or not holder.owner.same_run(owner):
        # Somebody took the root over between the check and the claim. Nobody has used this epoch
        # yet, so it goes: otherwise it would outrank the new owner's.
        store.remove_tree(layout.epoch_file(epoch))
        raise OwnershipError(_refusal(store, holder, owner))
    return epoch


def read_owner(store: Store) -> Claim | None:
    """Who the root belongs to; None for a root that nobody claimed."""
    return _read_claim(store, layout.OWNER_JSON) if store.exists(layout.OWNER_JSON) else None


def epoch_claim(store: Store, epoch: int) -> Claim:
    """Who took ``epoch`` and when. ``FileNotFoundError`` when nobody did."""
    return _read_claim(store, layout.epoch_file(epoch))


def current_epoch(store: Store) -> int:
    """The highest epoch taken so far; 0 when none is."""
    return _highest(store, _EPOCH, 0)


def revoke_epoch(store: Store, epoch: int) -> None:
    """End ``epoch`` and every lower one. Repeating it changes nothing."""
    store.create_exclusive(layout.revoked_file(epoch), b"{}\n")


def is_revoked(store: Store, epoch: int) -> bool:
    """Whether ``epoch`` or a higher one was revoked."""
    return epoch <= _highest(store, _REVOKED, -1)


def require_epoch(store: Store, epoch: int) -> None:
    """Raise ``StaleFence`` when ``epoch`` is revoked or a newer one is taken."""
    if is_revoked(store, epoch):
        raise StaleFence(f"{store.root}: epoch {epoch} is revoked")
    newest = current_epoch(store)
    if newest > epoch:
        raise StaleFence(f"{store.root}: epoch {epoch} refused, epoch {newest} owns the root")


def _settle_owner(store: Store, owner: Owner, take_over: bool) -> None:
    """Make ``owner`` the root's owner, or raise ``OwnershipError``."""
    if store.create_exclusive(layout.OWNER_JSON, _encoded(owner, 0)):
        return
    holder = read_owner(store)
    if holder is not None and holder.owner.same_run(owner):
        return
    if not take_over:
        raise OwnershipError(_refusal(store, holder, owner))
    store.write_bytes(layout.OWNER_JSON, _encoded(owner, 0))


def _refusal(store: Store, holder: Claim | None, owner: Owner) -> str:
    if holder is None:
        return f"output root {store.root} lost its owner file while it was being claimed"
    held = holder.owner
    claimed = datetime.fromtimestamp(holder.claimed_unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f"output root {store.root} belongs to run {held.run_id} on {_server(held)}, claimed by "
        f"host {held.host or 'unknown'}, pid {held.pid}, at {claimed}; this is run {owner.run_id} "
        f"on {_server(owner)}. Choose another output.root, or adopt this one with --take-over when "
        "that run will never be continued there"
    )


def _server(owner: Owner) -> str:
    address = f" at {owner.address}" if owner.address else ""
    return f"Temporal server {owner.cluster_id}{address} (namespace {owner.namespace})"


def _encoded(owner: Owner, epoch: int) -> bytes:
    claim = Claim(owner=owner, claimed_unix=time.time(), epoch=epoch)
    return claim.model_dump_json(indent=2).encode() + b"\n"


def _read_claim(store: Store, rel: str) -> Claim:
    try:
        return Claim.model_validate_json(store.read_bytes(rel))
    except ValueError as error:
        reason = " ".join(str(error).split("\n")[:2])
        raise ContractViolation(
            f"{store.root}/{rel} is not a claim ({reason}); restore it, or choose another "
            "output.root"
        ) from error


def _highest(store: Store, pattern: re.Pattern[str], default: int) -> int:
    matches = (pattern.fullmatch(name) for name in store.list(layout.LEASE))
    return max((int(match[1]) for match in matches if match), default=default)
