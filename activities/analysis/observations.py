"""What was observed while a run went on: its pipeline, its engines, its GPUs, as series in time."""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Generic, TypeVar

from activities.analysis.held import UNKNOWN, Series, as_value
from activities.rollout.occupancy import GAUGES
from activities.storage import layout
from activities.storage.store import Store

ENGINE_FILE = "engine_occupancy_"
HARDWARE_FILE = "gpu_usage"
"""Files of this beginning under ``checkpoints/`` are looked for, e.g. ``gpu_usage_node0.jsonl``."""
GPU_METRICS = ("utilization.gpu", "utilization.memory", "memory.used", "memory.total")
"""Percent, percent, MiB, MiB."""

_HELD = (
    ("completed_queue", "response_tokens"),
    ("producer_ready", "groups"),
    ("producer_ready", "response_tokens"),
)
PIPELINE_SERIES = (
    *GAUGES,
    *(f"{place}_{kind}" for place, kind in _HELD),
    "completed_queue_full",
    "completed_put_blocked",
)
"""Of ``pipeline_occupancy.jsonl``; the last two are derived, 1 while it is so."""

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
"""Name and sorted labels of an engine's series."""
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, by its address."""

    url: str
    series: dict[SeriesKey, Series]
    failures: tuple[float, ...]
    """Unix times at which it did not answer."""
    first_seen: float

    def named(self, name: str) -> Series | None:
        """The series ``name``; None when it has several, which are never added up."""
        found = [series for (known, _), series in self.series.items() if known == name]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of the node that a file is of."""

    node: str
    """Stem of the file."""
    host: str
    index: int
    uuid: str | None
    metrics: dict[str, Series]


class _Looks(Generic[Key]):
    """Columns of values by key.

    Arrays, because lists of rows or of numbers cost the garbage collector as long as the reading
    does, and longer for each look in a long run.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.times = array("d")
        self._columns: dict[Key, array[float]] = {key: array("d") for key in keys}

    def add(self, time: float, values: Mapping[Key, Any]) -> None:
        """What was seen at ``time``; a key that is not among it is unknown from then on."""
        for key, value in values.items():
            column = self._columns.get(key)
            if column is None:
                column = self._columns[key] = array("d")
            self._fill(column)
            column.append(as_value(value))
        self.times.append(time)

    def series(self) -> dict[Key, Series]:
        """One for every key."""
        for column in self._columns.values():
            self._fill(column)
        return {key: Series(self.times, column) for key, column in self._columns.items()}

    def _fill(self, column: "array[float]") -> None:
        """With ``UNKNOWN`` for the looks that did not see it."""
        if missing := len(self.times) - len(column):
            column.extend(repeat(UNKNOWN, missing))


def pipeline_series(store: Store) -> dict[str, Series]:
    """Every series of ``PIPELINE_SERIES``; without points when the run observed nothing."""
    looks = _Looks[str](PIPELINE_SERIES)
    for time, row in _timed(store, layout.PIPELINE_OCCUPANCY):
        looks.add(time, _pipeline_values(row))
    return looks.series()


def engines(store: Store) -> list[Engine]:
    """Every engine that was ever observed, in the order of their addresses."""
    found = [_engine(store, name) for name in _names(store, ENGINE_FILE)]
    return sorted((engine for engine in found if engine), key=lambda engine: engine.url)


def devices(store: Store) -> list[Device]:
    """Every GPU of every sampled node, by file and index."""
    return [device for name in _names(store, HARDWARE_FILE) for device in _devices(store, name)]


def _pipeline_values(row: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {name: row.get(name) for name in GAUGES}
    for place, kind in _HELD:
        values[f"{place}_{kind}"] = (row.get(place) or {}).get(kind)
    groups, capacity = row.get("completed_queue_groups"), row.get("completed_queue_capacity_groups")
    known = None if groups is None or capacity is None else groups >= capacity
    values["completed_queue_full"] = known
    waiting = row.get("completed_put_current_wait_seconds")
    values["completed_put_blocked"] = None if waiting is None else waiting > 0
    return values


def _engine(store: Store, name: str) -> Engine | None:
    looks, failures = _Looks[SeriesKey](), []
    url = None
    for time, row in _timed(store, f"checkpoints/{name}"):
        url = str(row.get("engine")) if url is None else url
        looks.add(time, _engine_values(row))
        if "error" in row:
            failures.append(time)
    if url is None:
        return None
    return Engine(url, looks.series(), tuple(failures), first_seen=looks.times[0])


def _engine_values(row: Mapping[str, Any]) -> dict[SeriesKey, float | None]:
    values: dict[SeriesKey, float | None] = {}
    for series in row.get("series") or ():
        key = series["name"], tuple(sorted(series["labels"].items()))
        values[key] = None if key in values else series["value"]
    return values


def _devices(store: Store, name: str) -> Iterator[Device]:
    looks = {metric: _Looks[tuple[int, str | None]]() for metric in GPU_METRICS}
    host = ""
    for time, row in _timed(store, f"checkpoints/{name}"):
        host = str(row.get("host") or host)
        found = [device for device in row.get("devices") or () if device.get("index") is not None]
        for metric in GPU_METRICS:
            values = {(int(d["index"]), d.get("uuid")): d.get(metric) for d in found}
            looks[metric].add(time, values)
    series = {metric: seen.series() for metric, seen in looks.items()}
    for index, uuid in sorted(series[GPU_METRICS[0]], key=lambda key: (key[0], key[1] or "")):
        metrics = {metric: series[metric][index, uuid] for metric in GPU_METRICS}
        yield Device(name.removesuffix(".jsonl"), host, index, uuid, metrics)


def _names(store: Store, beginning: str) -> list[str]:
    names = store.list("checkpoints")
    # On an object store a file of rows is a folder of parts.
    files = {name.removesuffix(".parts") for name in names if name.startswith(beginning)}
    return sorted(name for name in files if name.endswith(".jsonl"))


def _timed(store: Store, rel: str) -> Iterator[tuple[float, dict[str, Any]]]:
    for row in store.each_jsonl(rel):
        if isinstance(row.get("time_unix"), int | float):
            yield float(row["time_unix"]), row
