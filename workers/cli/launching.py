"""Starting a run's workflow, with its launch receipt."""

import asyncio
import os
from pathlib import Path

from temporalio.client import Client

from configs.load import Loaded
from models.checkpoint import RewindRequest
from workers import ray_address
from workers.cli.launches import require_folder, write_receipt
from workers.cli.output import notice
from workers.cli.place import Place
from workers.cli.server import start_run

EMBEDDED_FLEET = "local"
"""``launch.fleet`` that the embedded stack's GPU worker serves."""


async def launch(
    client: Client,
    place: Place,
    loaded: Loaded,
    *,
    take_over: bool = False,
    rewind: RewindRequest | None = None,
) -> Path:
    """Start the workflow and return where its receipt is.

    Raises:
        WorkflowAlreadyStartedError: it runs already.
        ServiceUnreachable: the server, or the Ray cluster that is named, did not answer in time.
        ConfigurationError: the receipt cannot be written; where possible, before the start.
    """
    ray = os.environ.get(ray_address.VARIABLE)
    if place.stack is None and ray:
        await ray_address.require_listener(ray)
    fleet = loaded.spec.launch.fleet
    if place.stack is not None and fleet != EMBEDDED_FLEET:
        notice(
            f"perdure: warning: launch.fleet = {fleet!r}, while the embedded stack serves "
            f"{EMBEDDED_FLEET!r}; the run waits for: perdure worker gpu --fleet {fleet}"
        )
    await asyncio.to_thread(require_folder)
    execution = await start_run(client, loaded, take_over=take_over, rewind=rewind)
    derived = {} if rewind is None else {"rewind": rewind.model_dump(mode="json")}
    return await asyncio.to_thread(
        write_receipt, loaded, place, client.namespace, execution, **derived
    )
