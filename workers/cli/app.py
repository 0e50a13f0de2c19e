"""All verbs of ``perdure``, and the one place where errors become exit codes."""

import importlib.metadata
from collections.abc import Sequence
from typing import Annotated

import typer

from workers.cli import (
    analyze,
    audit,
    codec_server,
    config,
    control,
    doctor,
    evaluation,
    fork,
    gpu_usage,
    model,
    rewind,
    run,
    schedule,
    stack,
    status,
)
from workers.cli.errors import DONE, report
from workers.cli.report import report as run_report

app = typer.Typer(
    name="perdure",
    help="Durable RL post-training for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Durable RL post-training for language models."""
    del debug  # taken out of the arguments before parsing, so that it works after a verb too


@app.command()
def version() -> None:
    """Print the version."""
    try:
        installed = importlib.metadata.version("perdure")
    except importlib.metadata.PackageNotFoundError:
        installed = "(a checkout that is not installed)"
    typer.echo(f"perdure {installed}")


def _register() -> None:
    for panel, commands in (
        ("Runs", (run.run, run.start, run.wait, status.status, audit.audit, run_report)),
        (
            "Control",
            (
                *(control.pause, control.resume, control.checkpoint, control.stop),
                *(control.cancel, rewind.rewind, fork.fork),
            ),
        ),
        ("Run files", (config.validate, config.plan)),
        ("Embedded stack", (stack.up, stack.down)),
        ("Diagnosis", (gpu_usage.gpu_usage, codec_server.codec_server)),
    ):
        for command in commands:
            app.command(rich_help_panel=panel)(command)
    app.add_typer(evaluation.group, name="evaluation", rich_help_panel="Runs")
    app.add_typer(schedule.group, name="schedule", rich_help_panel="Runs")
    app.add_typer(config.group, name="config", rich_help_panel="Run files")
    app.add_typer(model.group, name="model", rich_help_panel="Run files")
    app.add_typer(doctor.group, name="doctor", rich_help_panel="Diagnosis")
    app.add_typer(analyze.group, name="analyze", rich_help_panel="Diagnosis")
    app.add_typer(stack.worker_group, name="worker", rich_help_panel="Embedded stack")


_register()


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Never raises."""
    debug = "--debug" in arguments
    try:
        app([argument for argument in arguments if argument != "--debug"], prog_name="perdure")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else DONE
    except (Exception, KeyboardInterrupt) as error:  # the process entry: every error ends here
        return report(error, debug=debug)
    return DONE
