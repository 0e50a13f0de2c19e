"""``export``: the final Hugging Face folder, re-loaded and compared by the trainer."""

import asyncio

from activities.heartbeat import beating
from activities.site import Site, spec_of, store_of
from activities.timing import timed
from models.errors import TrainerLost
from models.evaluation import ExportReport, ExportRequest
from models.ids import FenceToken


async def export(site: Site, request: ExportRequest, token: FenceToken) -> ExportReport:
    """Write ``output.hf_dir`` under the root."""
    return await beating(
        _export(site, request, token),
        "export",
        site.fleet.trainer(request.run).progress,
        stalled=TrainerLost,
    )


async def _export(site: Site, request: ExportRequest, token: FenceToken) -> ExportReport:
    spec = await asyncio.to_thread(spec_of, request.run)
    async with timed(store_of(request.run), "final_hf_export", None):
        return await site.fleet.trainer(request.run).export(token, spec.output.hf_dir)
