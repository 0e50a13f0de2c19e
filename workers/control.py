"""The control worker: workflow code and the run's files. Needs Temporal only, no torch, no Ray."""

from activities.catalog import ControlActivities
from activities.retraining.catalog import RetrainingActivities
from workers.serving import build_worker, connect_patiently, run_process, serve
from workers.sources.rows import jsonl_rows
from workflows.options import CONTROL_QUEUE


async def run_control_worker() -> None:
    """Serve the control queue until SIGTERM."""
    client = await connect_patiently()
    activities = [*ControlActivities().all(), *RetrainingActivities(jsonl_rows).all()]
    await serve(build_worker(client, CONTROL_QUEUE, activities))


def main() -> None:
    """Entry of the process; does not return."""
    run_process(run_control_worker())


if __name__ == "__main__":
    main()
