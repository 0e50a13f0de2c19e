"""The process of one rank of a trainer, but the first: reads commands, does them with the others.

Standard input: a ``RankOrder``, then one command a line. Its end ends the process. An error that
all ranks raised together is told by the first one; any other ends the process, and with it all.
"""

import os
import sys
import traceback
from pathlib import Path

import structlog

from activities.site import spec_of, store_of
from activities.storage import layout
from activities.storage.local_copy import local_folder
from activities.storage.store import Store
from models.errors import PerdureError
from workers.actors.garbage import freeze_living_objects
from workers.trainers.commands import COMMANDS
from workers.trainers.contract_file import ContractFile
from workers.trainers.gang import RankOrder
from workers.trainers.local import LocalTrainer
from workers.trainers.process_ranks import join_ranks
from workers.trainers.ranks import concluded

_log = structlog.get_logger(__name__)


def run(order: RankOrder) -> None:
    """Do commands until standard input ends."""
    store = store_of(order.run)
    ranks = join_ranks(Path(order.rendezvous), order.rank, order.world, order.timeout_s)
    try:
        with concluded(ranks):
            trainer = LocalTrainer(
                spec_of(order.run),
                local_folder(store, layout.PREPARED_MODEL),
                ContractFile(store, order.rank),
                ranks,
            )
    except PerdureError as error:
        if not ranks.has_agreed(error):
            raise
        _log.error("model refused", reason=error.message)
        sys.stdin.read()  # an end of its own accord would count as a loss
        return
    freeze_living_objects()
    for line in sys.stdin:
        follow(trainer, store, line)


def follow(trainer: LocalTrainer, store: Store, line: str) -> None:
    """Do one command; its result is the first rank's to tell."""
    command = COMMANDS.validate_json(line)
    try:
        command.run(trainer, store)
    except PerdureError as error:
        if not trainer.ranks.has_agreed(error):
            raise
        _log.warning("command refused", command=command.name, reason=error.message)


def main() -> None:
    """Entry of the process; does not return.

    It never waits for the communication library's own threads, which may wait for other ranks.
    """
    status = 1
    try:
        run(RankOrder.model_validate_json(sys.stdin.readline()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
