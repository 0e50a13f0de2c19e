"""``doctor``: check what a run needs, before it needs it."""

import typer

from workers.cli.doctor_engine import engine
from workers.cli.doctor_gpu import gpu
from workers.cli.doctor_services import services

group = typer.Typer(no_args_is_help=True, help="Check engines, machines and services.")


@group.callback()
def _group() -> None:
    """Check engines, machines and services."""


group.command("engine")(engine)
group.command("gpu")(gpu)
group.command("services")(services)
