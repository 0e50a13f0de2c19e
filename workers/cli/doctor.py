"""``doctor``: check what a run needs, before it needs it."""

import typer

from workers.cli.doctor_engine import engine
from workers.cli.doctor_gpu import gpu

group = typer.Typer(no_args_is_help=True, help="Check engines and machines.")


@group.callback()
def _group() -> None:
    """Check engines and machines."""


group.command("engine")(engine)
group.command("gpu")(gpu)
