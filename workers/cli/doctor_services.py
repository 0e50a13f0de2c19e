"""``doctor services``: which retries our client of a code service makes, against a live one."""

import asyncio
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from models.errors import ConfigurationError
from workers.cli.errors import FAILED
from workers.cli.output import notice, print_json


def services(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of a code service.")],
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Also write the report here.")
    ] = None,
    backoff: Annotated[
        float, typer.Option(metavar="SECONDS", help="Before the first repetition; then doubled.")
    ] = 1.0,
) -> None:
    """Put faults before a code service and compare our client's attempts with what they must be.

    Real programs run at the service. One JSON line a case; exit code 1 at the first that fails,
    and no report then.
    """
    from activities.verifiers.code import require_address
    from activities.wire.code_service import RetryPolicy

    require_address(url)
    if not (math.isfinite(backoff) and backoff >= 0):
        raise ConfigurationError(f"--backoff {backoff}: must be a finite number of at least 0")
    if output is not None and output.is_dir():
        raise ConfigurationError(f"--output {output}: is a folder; name a file")
    policy = RetryPolicy(backoff_factor=backoff)
    seen = asyncio.run(_probe(url, policy))
    if seen is None:
        raise typer.Exit(FAILED)
    if output is not None:
        _write(output, _report(url, policy, seen))
        notice(f"report: {output}")


async def _probe(url: str, policy: Any) -> list[dict[str, Any]] | None:
    """What was seen of every case; None when one failed, which is said."""
    from workers.preflight.services import probe

    seen = []
    async for case, report in probe(url, policy):
        seen.append(asdict(report))
        print_json(seen[-1])
        if not report.passed:
            status, why = report.diagnostics.get("status"), report.error
            notice(
                f"perdure: {case.name}: expected {case.attempts} attempts, {case.forwarded} of "
                f"them at the service, score {case.score}, status {case.status}; seen "
                f"{report.attempts}, {report.forwarded}, {report.score}, {status}"
                + (f" ({why})" if why else "")
            )
            return None
    return seen


def _report(url: str, policy: Any, seen: list[dict[str, Any]]) -> dict[str, Any]:
    from workers.preflight.services import LIMITS

    return {
        "passed": True,
        "retry_budget": policy.budget,
        "backoff_factor": policy.backoff_factor,
        "upstream": url,
        "cases": seen,
        "limits": list(LIMITS),
    }


def _write(output: Path, report: dict[str, Any]) -> None:
    from activities.storage.store import Store

    Store(output.absolute().parent).write_json(output.name, report)
