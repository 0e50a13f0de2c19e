"""``GET /metrics`` of the router: Prometheus text."""

from collections.abc import Iterator, Mapping

from models.routing import RouterState

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def metrics_text(state: RouterState, faults: Mapping[str, int], num_groups: int) -> str:
    """Render what the router knows; ``faults``: refused calls by kind, since the start."""
    engines = [(_label("engine", each.engine.name), each) for each in state.engines]
    lines = [
        *_metric("active_calls", "Calls sent and not answered", [("", state.active_calls)]),
        *_metric("waiting_calls", "Calls that wait for an engine", [("", state.waiting_calls)]),
        *_metric("groups", "Prompt groups on an engine", [("", num_groups)]),
        *_metric(
            "engine_active_calls",
            "Calls sent to an engine and not answered",
            [(label, each.active_calls) for label, each in engines],
        ),
        *_metric(
            "engine_reserved_calls",
            "Calls of an engine's groups, those not sent yet included",
            [(label, each.reserved_calls) for label, each in engines],
        ),
        *_metric(
            "engine_routable",
            "1 when new groups may go to an engine",
            [(label, int(each.routable)) for label, each in engines],
        ),
        *_metric(
            "engine_policy_version",
            "Policy version that an engine is registered with",
            [(label, each.engine.version) for label, each in engines],
        ),
        *_metric(
            "faults_total",
            "Calls that were refused",
            [(_label("kind", kind), count) for kind, count in faults.items()],
            "counter",
        ),
    ]
    return "\n".join(lines) + "\n"


def _metric(
    name: str, text: str, rows: list[tuple[str, int]], kind: str = "gauge"
) -> Iterator[str]:
    name = f"perdure_router_{name}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for label, value in rows:
        yield f"{name}{label} {value}"


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{name}="{escaped}"}}'
