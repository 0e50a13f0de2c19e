"""The GPU worker: workflow code and every activity beside one Ray cluster.

It serves the fleet's queue with both, so that a run that moved here starts its activities eagerly.
The process itself never computes: torch and engines live in Ray actors, and its event loop stays
free to heartbeat.
"""

import asyncio
import os

from activities.catalog import ControlActivities, FleetActivities
from activities.site import Site, spec_of
from activities.wire.client import EngineClient
from models.ports import FleetPort, Tracker
from workers.fleet import RayFleet
from workers.serving import build_worker, connect_patiently, run_process, serve
from workers.tracking.fan_out import FanOut
from workers.tracking.wandb_sink import WandbSink
from workflows.options import fleet_queue

FLEET_VARIABLE = "PERDURE_FLEET"
"""Name of the fleet that this worker serves: ``launch.fleet`` of the runs that come here."""

TRACKER_CLOSE_S = 10.0


async def run_gpu_worker(fleet: FleetPort, tracker: Tracker, fleet_name: str) -> None:
    """Serve the queue of ``fleet_name`` until SIGTERM."""
    client = await connect_patiently()
    site = Site(fleet=fleet, tracker=tracker, engine=EngineClient)
    activities = [*ControlActivities(site).all(), *FleetActivities(site).all()]
    await serve(build_worker(client, fleet_queue(fleet_name), activities))


async def _run() -> None:
    trackers = FanOut([WandbSink(spec_of)])
    try:
        await run_gpu_worker(RayFleet(), trackers, os.environ.get(FLEET_VARIABLE, "local"))
    finally:
        await asyncio.to_thread(trackers.close, TRACKER_CLOSE_S)


def main() -> None:
    """Entry of the process; does not return."""
    run_process(_run())


if __name__ == "__main__":
    main()
