"""Names of Temporal task queues."""

CONTROL_QUEUE = "perdure-control"
"""Where runs start: workflow code, claim, record."""


def fleet_queue(fleet: str) -> str:
    """Task queue of the workers beside the Ray cluster ``fleet``."""
    return f"perdure-fleet-{fleet}"
