"""Per-slot state of the running requests as columns: one step is a few vector operations."""

from dataclasses import dataclass, field

import torch

from workers.engines.native.request import Request
from workers.engines.native.sampler import SamplingRows

NO_TOKEN = -1
INTEGERS = ("token", "position", "step", "max_new", "min_new", "top_k", "seed")
FLOATS = ("temperature", "top_p", "min_p")


@dataclass(slots=True)
class Rows:
    """Columns of ``size`` slots; slots [0, len(requests)) are live, the rest is inert."""

    size: int
    requests: list[Request] = field(default_factory=list)
    integers: dict[str, torch.Tensor] = field(default_factory=dict)
    floats: dict[str, torch.Tensor] = field(default_factory=dict)
    stops: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    plain: bool = True
    """No live row is greedy or restricted."""
    holds_back_stops: bool = False
    """Some live row has ``min_new_tokens``."""
    watched: list[Request] = field(default_factory=list)
    max_need: int = 0
    """KV positions that the longest live request can grow to."""
    changed: bool = False
    """Rows came or went since the last ``refresh``."""

    def __post_init__(self) -> None:
        self.integers = {name: torch.zeros(self.size, dtype=torch.int64) for name in INTEGERS}
        self.floats = {name: torch.ones(self.size) for name in FLOATS}
        self.stops = torch.full((self.size, 4), NO_TOKEN)

    def column(self, name: str, num_rows: int | None = None) -> torch.Tensor:
        """The first ``num_rows`` (default: live) entries of an integer column, as a view."""
        return self.integers[name][: len(self.requests) if num_rows is None else num_rows]

    def sampling(self) -> SamplingRows:
        """Views of the live rows' sampling parameters."""
        n = len(self.requests)
        return SamplingRows(
            **{name: column[:n] for name, column in self.floats.items()},
            top_k=self.column("top_k"),
            seed=self.column("seed"),
            step=self.column("step"),
        )

    def append(self, request: Request, last_token: int) -> None:
        """Take ``request`` into the next slot; ``last_token`` of its context is fed first."""
        slot, sampling = len(self.requests), request.sampling
        request.slot = slot
        self.requests.append(request)
        values = {
            "token": last_token,
            "position": request.context_length - 1,
            "step": len(request.kept_ids),
            "max_new": sampling.max_new_tokens,
            "min_new": sampling.min_new_tokens,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
        }
        for name, value in values.items():
            self.integers[name][slot] = value
        self.floats["temperature"][slot] = sampling.temperature
        self.floats["top_p"][slot] = sampling.top_p
        self.floats["min_p"][slot] = sampling.min_p
        self._set_stops(slot, sampling.stop_token_ids)
        self.changed = True

    def drop(self, slot: int) -> int | None:
        """Forget the request of ``slot``; the last one takes its place.

        Returns the slot that moved, None when ``slot`` was the last.
        """
        last = len(self.requests) - 1
        moved = self.requests.pop()
        source: int | None = None
        if slot != last:
            source = last
            for column in (*self.integers.values(), *self.floats.values(), self.stops):
                column[slot] = column[last]
            self.requests[slot] = moved
            moved.slot = slot
        # An inert row that is still computed (fixed shapes) must stay inside the cache.
        self.integers["token"][last] = 0
        self.integers["position"][last] = 0
        self.changed = True
        return source

    def refresh(self) -> None:
        """Recompute what depends on who is running, if that changed."""
        if not self.changed:
            return
        self.changed = False
        self.max_need = max((request.need for request in self.requests), default=0)
        self.plain = all(request.sampling.plain for request in self.requests)
        self.holds_back_stops = any(r.sampling.min_new_tokens > 0 for r in self.requests)
        self.watched = [request for request in self.requests if request.watched]

    def _set_stops(self, slot: int, ids: tuple[int, ...]) -> None:
        width = self.stops.shape[1]
        if len(ids) > width:
            wider = torch.full((self.size, len(ids)), NO_TOKEN)
            wider[:, :width] = self.stops
            self.stops = wider
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
