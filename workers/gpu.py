"""The GPU worker: workflow code and every activity beside one Ray cluster.

It serves the fleet's queue with both, so that a run that moved here starts its activities eagerly.
The process itself never computes: torch and engines live in Ray actors, and its event loop stays
free to heartbeat.
"""

import asyncio
import os
from datetime import timedelta
from functools import partial

import structlog
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.background.catalog import BackgroundActivities
from activities.catalog import ControlActivities, FleetActivities
from activities.site import Site, spec_of
from activities.wire.client import EngineClient
from activities.wire.router_client import RouterClient
from models.errors import PerdureError
from models.ports import Tracker
from workers.fleet import RayFleet
from workers.fleet.cluster import RayCluster
from workers.fleet.evaluating import RayEvaluators
from workers.metrics_address import RUN_METRICS, metrics_address
from workers.serving import build_worker, connect_patiently, run_process, serve
from workers.source_digest import source_digest
from workers.tracking.fan_out import FanOut
from workers.tracking.prometheus_sink import PrometheusSink
from workers.tracking.wandb_sink import WandbSink
from workflows.options import fleet_queue

FLEET_VARIABLE = "PERDURE_FLEET"
"""Name of the fleet that this worker serves: ``launch.fleet`` of the runs that come here."""

TRACKER_CLOSE_S = 10.0
REAP_INTERVAL_S = 60.0
RPC_TIMEOUT = timedelta(seconds=10)

_log = structlog.get_logger(__name__)


async def run_gpu_worker(fleet: RayFleet, tracker: Tracker, fleet_name: str) -> None:
    """Serve the queue of ``fleet_name`` until SIGTERM.

    Raises:
        ServiceUnreachable: Temporal or Ray does not answer.
    """
    client = await connect_patiently()
    await fleet.join()
    site = Site(fleet=fleet, tracker=tracker, engine=EngineClient, router=RouterClient)
    background = BackgroundActivities(site, RayEvaluators(RayCluster()).open, source_digest())
    activities = [
        *ControlActivities(site).all(),
        *FleetActivities(site).all(),
        *background.all(),
    ]
    reaping = asyncio.create_task(_reap_forever(fleet, client))
    try:
        await serve(build_worker(client, fleet_queue(fleet_name), activities))
    finally:
        reaping.cancel()
        await asyncio.gather(reaping, return_exceptions=True)
        await fleet.close()


async def _reap_forever(fleet: RayFleet, client: Client) -> None:
    """Tear down fleets whose run ended without doing so: it was terminated, or timed out."""
    while True:
        try:
            await fleet.reap(partial(_may_be_open, client))
        except (PerdureError, RPCError, OSError) as error:
            _log.warning("left-over fleets not looked for", reason=str(error))
        await asyncio.sleep(REAP_INTERVAL_S)


async def _may_be_open(client: Client, run_id: str) -> bool:
    """Whether ``run_id`` runs. One that this server does not know may belong to another."""
    handle = client.get_workflow_handle(run_id)
    try:
        described = await handle.describe(rpc_timeout=RPC_TIMEOUT)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return True
        raise
    open_states = (WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.CONTINUED_AS_NEW)
    return described.status in open_states


async def _run() -> None:
    trackers = FanOut([WandbSink(spec_of), *_prometheus()])
    try:
        await run_gpu_worker(RayFleet(), trackers, os.environ.get(FLEET_VARIABLE, "local"))
    finally:
        await asyncio.to_thread(trackers.close, TRACKER_CLOSE_S)


def _prometheus() -> list[PrometheusSink]:
    address = metrics_address(RUN_METRICS)
    return [PrometheusSink(address)] if address else []


def main() -> None:
    """Entry of the process; does not return."""
    run_process(_run())


if __name__ == "__main__":
    main()
