"""The read-only part of the engine contract, asked of a live server.

Nothing here pauses the server, changes its weights or drops its cache, and nothing of what is known
to end one is sent. A few short responses are sampled.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from activities.wire import contract
from activities.wire.probe import EngineProbe
from models.errors import ServiceUnreachable
from workers.preflight.finding import Finding


class Seen(NamedTuple):
    """What a check saw; ``ok`` is None where the server does not offer what it is about."""

    text: str
    ok: bool | None


@dataclass(frozen=True, slots=True)
class Subject:
    """The server under examination, and what it told of itself."""

    probe: EngineProbe
    model: dict[str, Any]
    """``/model_info``."""
    server: dict[str, Any]
    """``/server_info``."""

    @property
    def longest_input(self) -> int:
        """Tokens that a request may have at most; 0 when the server does not tell."""
        told = self.server.get("max_req_input_len")
        return told if isinstance(told, int) else 0


class Check(NamedTuple):
    """One question."""

    name: str
    expected: str
    ask: Callable[[Subject], Awaitable[Seen]]


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one server."""

    url: str
    version: str
    model: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> int:
        """How many checks were not met."""
        return sum(finding.ok is False for finding in self.findings)


async def examine(probe: EngineProbe, checks: tuple[Check, ...]) -> Report:
    """Ask every check of the server that ``probe`` reaches.

    Raises:
        ServiceUnreachable: the server does not tell of itself. Later requests without an answer
            are findings.
    """
    subject = Subject(
        probe,
        _object((await probe.get(contract.MODEL_INFO)).json()),
        _object((await probe.get(contract.SERVER_INFO)).json()),
    )
    findings = [await _finding(check, subject) for check in checks]
    version = subject.server.get("version")
    return Report(
        url=probe.url,
        version=str(version) if version else "unknown",
        model=str(subject.model.get("model_path", "unknown")),
        findings=tuple(findings),
    )


async def _finding(check: Check, subject: Subject) -> Finding:
    try:
        seen = await check.ask(subject)
    except ServiceUnreachable as error:
        seen = Seen(error.message, False)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # Any server may answer at the address, and anything at all.
        seen = Seen(f"an answer of another shape ({type(error).__name__}: {error})", False)
    return Finding(check.name, check.expected, seen.text, seen.ok)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


async def _health(subject: Subject) -> Seen:
    reply = await subject.probe.get(contract.HEALTH)
    return Seen(
        f"{reply.status}, {len(reply.text)} characters", (reply.status, reply.text) == (200, "")
    )


async def _model_info(subject: Subject) -> Seen:
    model = subject.model
    named = all(isinstance(model.get(key), str) for key in ("model_path", "weight_version"))
    return Seen(f"{model.get('architectures')}, version {model.get('weight_version')!r}", named)


async def _server_info(subject: Subject) -> Seen:
    told = {key: subject.server.get(key) for key in ("version", "max_req_input_len")}
    return Seen(f"{told['version']}, {told['max_req_input_len']} tokens", None not in told.values())


async def _loads(subject: Subject) -> Seen:
    reply = await subject.probe.get(contract.LOADS)
    loads = _object(reply.json()).get("loads")
    if not isinstance(loads, list) or not loads:
        return Seen(f"{reply.status}", False)
    counts = [loads[0].get(key) for key in ("num_running_reqs", "num_waiting_reqs")]
    running, waiting = counts
    return Seen(f"{running} running, {waiting} waiting", all(isinstance(n, int) for n in counts))


async def _abort_unknown(subject: Subject) -> Seen:
    reply = await subject.probe.post(contract.ABORT_REQUEST, {"rid": "f" * 32})
    return Seen(f"{reply.status}, {reply.text[:40]!r}", (reply.status, reply.text) == (200, ""))


INFORMATION = (
    Check("health", "200, no body", _health),
    Check("model_info", "model_path and weight_version", _model_info),
    Check("server_info", "version and max_req_input_len", _server_info),
    Check("loads", "requests running and waiting", _loads),
    Check("abort of an unknown id", "200, no body", _abort_unknown),
)
