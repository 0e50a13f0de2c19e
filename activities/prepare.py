"""``prepare``: model and data made ready, the fleet brought up or re-attached to."""

from activities.heartbeat import beating
from activities.site import Site, store_of
from activities.timing import timed
from models.ids import FenceToken
from models.run import PrepareReport, PrepareRequest


async def prepare(site: Site, request: PrepareRequest, token: FenceToken) -> PrepareReport:
    """Bring the run's fleet up under ``token``'s epoch; see ``FleetPort.prepare``."""
    return await beating(_prepare(site, request, token), "prepare")


async def _prepare(site: Site, request: PrepareRequest, token: FenceToken) -> PrepareReport:
    details = {"next_update": request.next_update, "epoch": request.epoch}
    async with timed(store_of(request.run), "placement", None, details):
        return await site.fleet.prepare(token, request)
