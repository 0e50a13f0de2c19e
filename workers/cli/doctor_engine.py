"""``doctor engine``: whether a live server keeps the engine contract."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from models.errors import ConfigurationError
from workers.cli.errors import FAILED
from workers.cli.findings import findings_table
from workers.cli.output import out, print_json
from workers.local_stack.state import state_dir, token_path

if TYPE_CHECKING:
    from workers.preflight.engine import Report

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def engine(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of a server.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each request.")] = 30.0,
) -> None:
    """Ask a live engine everything of the contract that changes nothing in it.

    A few short responses are sampled; the server is not paused, and weights and cache stay. Exit
    code 1 when a check fails, 3 when the server does not answer.
    """
    _require_address(url)
    report = asyncio.run(_examine(url, timeout))
    if json:
        passed = sum(finding.ok is True for finding in report.findings)
        print_json(asdict(report) | {"passed": passed, "failed": report.failed})
    else:
        show(out(), report)
    if report.failed:
        raise typer.Exit(FAILED)


def show(console: Console, report: "Report") -> None:
    """The findings as a table, and the verdict as the last line."""
    console.print(findings_table(report.findings))
    offered = sum(finding.ok is not None for finding in report.findings)
    met = f"{offered - report.failed} of {offered} checks met"
    console.print(
        f"{report.url}: version {report.version}, {met}",
        markup=False,
        soft_wrap=True,
    )


async def _examine(url: str, timeout_s: float) -> "Report":
    from activities.wire.probe import EngineProbe
    from workers.preflight.engine import INFORMATION, examine
    from workers.preflight.engine_generation import GENERATION
    from workers.preflight.engine_refusals import REFUSALS

    probe = EngineProbe(url, timeout_s=timeout_s, token=_token(url))
    try:
        return await examine(probe, (*INFORMATION, *GENERATION, *REFUSALS))
    finally:
        await probe.aclose()


def _token(url: str) -> str | None:
    """The token that was given, or on loopback that of the engines of the embedded stack."""
    from activities.wire.token import RAY_TOKEN, engine_token, given_token

    if (token := given_token()) is not None or urlsplit(url).hostname not in LOOPBACK:
        return token
    try:
        secret = token_path(state_dir()).read_text(encoding="utf-8")
    except OSError:
        return None
    return engine_token({RAY_TOKEN: secret})


def _require_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"URL {url!r} is no address of a server; write http://HOST:PORT")
