"""The exporter's report, read back from the run's history: it travels in no other place."""

from temporalio.client import Client
from temporalio.service import RPCError

from models.evaluation import ExportReport
from workers.cli.server import RPC_TIMEOUT

ACTIVITY = "export"


async def export_report_of(client: Client, run_id: str) -> ExportReport | None:
    """What the ``export`` activity of the newest execution returned; none if there is no answer."""
    scheduled: set[int] = set()
    handle = client.get_workflow_handle(run_id)
    try:
        async for event in handle.fetch_history_events(rpc_timeout=RPC_TIMEOUT):
            if event.activity_task_scheduled_event_attributes.activity_type.name == ACTIVITY:
                scheduled.add(event.event_id)
            completed = event.activity_task_completed_event_attributes
            if completed.scheduled_event_id in scheduled:
                (report,) = await client.data_converter.decode(
                    completed.result.payloads, [ExportReport]
                )
                return report if isinstance(report, ExportReport) else None
    except RPCError:
        return None
    return None
