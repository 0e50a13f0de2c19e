"""How busy pipeline, engines and GPUs were, weighted by time: ``occupancy-analysis.json``."""

from collections.abc import Sequence
from typing import Any

from activities.analysis.held import MAX_HOLD_S
from activities.analysis.observations import (
    Device,
    Engine,
    devices,
    engines,
    pipeline_series,
)
from activities.analysis.roles import Allocation, Fleet
from activities.analysis.run_facts import read_run
from activities.analysis.stages import read_timings

Window = tuple[float, float]
SCOPE = (
    "time-weighted over the window; a value holds until the next look, at most "
    "max_sample_hold_seconds; gaps are missing coverage, not zero"
)


def analyze(
    root: str, warmup: int = 6, window: Window | None = None, *, allow_incomplete: bool = False
) -> dict[str, Any]:
    """Summarize what was observed under ``root``, as plain JSON.

    Args:
        root: the run's ``output.root``.
        warmup: first updates that are left out of the default window.
        window: Unix times; by default from the first start to the last end of a measured
            collection, training or publication.
        allow_incomplete: also take a run that is not complete or did work again.

    Raises:
        ConfigurationError: no run is there, it is incomplete, or the window is empty.
        ContractViolation: a stage failed, or the files of the run contradict one another.
    """
    facts = read_run(root, warmup=warmup, allow_incomplete=allow_incomplete)
    if window is None:
        updates = read_timings(facts, warmup).updates
        window = (
            min(update.start_unix for update in updates),
            max(update.end_unix for update in updates),
        )
    seen = devices(facts.store)
    fleet = Fleet(facts.store, Allocation.of(facts.plan))
    return {
        "schema_version": 1,
        "root": facts.store.root,
        "scope": SCOPE,
        "stopped_for_time": facts.stopped_for_time,
        "warmup_updates": warmup,
        "start_unix": window[0],
        "end_unix": window[1],
        "max_sample_hold_seconds": MAX_HOLD_S,
        "pipeline": {
            name: series.summary(*window).document()
            for name, series in pipeline_series(facts.store).items()
        },
        "engines": {engine.url: _engine(engine, window) for engine in engines(facts.store)},
        "hardware": _hardware(seen, window),
        "node_roles": _node_roles(seen, fleet),
    }


def _engine(engine: Engine, window: Window) -> dict[str, Any]:
    return {
        "series": [
            {"name": name, "labels": dict(labels), **series.summary(*window).document()}
            for (name, labels), series in sorted(engine.series.items(), key=lambda item: item[0])
        ],
        "failed_observations": sum(window[0] <= time < window[1] for time in engine.failures),
    }


def _hardware(seen: Sequence[Device], window: Window) -> dict[str, list[dict[str, Any]]]:
    nodes: dict[str, list[dict[str, Any]]] = {}
    for device in seen:
        metrics = {
            name: series.summary(*window).document() for name, series in device.metrics.items()
        }
        row = {"uuid": device.uuid, "index": device.index, "metrics": metrics}
        nodes.setdefault(device.node, []).append(row)
    return nodes


def _node_roles(seen: Sequence[Device], fleet: Fleet) -> dict[str, dict[str, Any]]:
    """Node -> its host, and role -> indexes of its GPUs; ``unknown`` when nobody tells."""
    nodes: dict[str, dict[str, Any]] = {}
    for device in seen:
        node = nodes.setdefault(device.node, {"host": device.host})
        node.setdefault(fleet.role(device) or "unknown", []).append(device.index)
    return nodes
