"""``doctor gpu``: whether this machine, and a model on it, are fit for a run."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from models.errors import ConfigurationError
from workers.cli.errors import FAILED
from workers.cli.findings import findings_table
from workers.cli.output import out, print_json, quiet_or


def gpu(
    target: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Run file, or a model folder.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace one value (TOML); repeatable."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check driver, GPUs, packages, NCCL and rates; with FILE also the model and the agreement.

    Exit code 1 when a check fails, and on a machine without a GPU.
    """
    from workers.preflight.gpu import examine_gpus
    from workers.preflight.machine import has_gpu
    from workers.preflight.subject import subject_of

    if target is not None and not target.exists():
        raise ConfigurationError(f"{target}: no such run file or model folder")
    with ExitStack() as stack:
        subject = None
        if target is not None:
            opened = subject_of(target, override or (), has_gpu=has_gpu())
            subject = stack.enter_context(opened)
        findings = examine_gpus(subject, quiet_or(not json))
    failed = [finding for finding in findings if finding.ok is False]
    judged = sum(finding.ok is not None for finding in findings)
    if json:
        rows = [asdict(finding) for finding in findings]
        print_json({"findings": rows, "passed": judged - len(failed), "failed": len(failed)})
    else:
        out().print(findings_table(findings))
        verdict = "fit" if not failed else f"not fit: {', '.join(f.check for f in failed)}"
        met = f"{judged - len(failed)} of {judged} checks met; {verdict}"
        out().print(met, markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(FAILED)
