"""Continuous batching: who waits, who runs in which slot, and one step for all that run.

    add -> waiting --admit--> slots [0, n) --step--> finished
              ^                   |
              +----- retract -----+

A prompt's KV is computed once: all its tokens but the last are prefilled, siblings copy the rows,
and the last token is every row's first ordinary step. Only the model thread calls this.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from activities.wire.contract import QUEUE_FULL, RUNNING_TIMEOUT, WAITING_TIMEOUT
from workers.engines.native.decoder import Decoder
from workers.engines.native.kv import KvCache, round_up
from workers.engines.native.prefill import Prefill
from workers.engines.native.request import (
    Emit,
    Finished,
    Refused,
    Request,
    Tokens,
    aborted,
    aborted_in_queue,
)
from workers.engines.native.rows import Rows
from workers.engines.native.sampler import sample

FIXED_ROWS_STEP = 16
"""Deterministic batches are padded to a multiple of this many rows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler; times in seconds, None: no bound."""

    max_running: int
    max_queued: int
    waiting_timeout_s: float | None
    running_timeout_s: float | None


class Scheduler:
    """Owns the waiting queue, the running rows and the KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        limits: Limits,
        emit: Emit,
        matched_string: Callable[[Sequence[str], list[int]], str | None],
        fixed_length: int | None,
    ) -> None:
        """``fixed_length``: KV length of every step in deterministic mode, else None."""
        self.decoder, self.cache, self.limits = decoder, cache, limits
        self.waiting: deque[Request] = deque()
        size = limits.max_running if fixed_length is None else self._fixed_rows(limits.max_running)
        self.rows = Rows(size)
        self.paused = False
        self.weight_version = ""
        self.generated_tokens = 0
        self._emit = emit
        self._matched_string = matched_string
        self._fixed_length = fixed_length
        self._prefill = Prefill(decoder, cache, one_by_one=fixed_length is not None)
        self.allocate_cache()

    def allocate_cache(self) -> None:
        """Memory that the KV cache has before the first request: in deterministic mode all."""
        if self._fixed_length is not None:
            self.cache.resize(self.rows.size, self._fixed_length, live=0)

    def free_cache(self) -> None:
        """Give the KV cache's memory back. There must be no request."""
        self._prefill.forget()
        self.cache.free()

    @property
    def running(self) -> list[Request]:
        """Requests that hold a slot, in slot order."""
        return self.rows.requests

    @property
    def num_used_tokens(self) -> int:
        """KV positions in use."""
        return int(self.rows.column("position").sum()) + len(self.running)

    @property
    def cache_hit_rate(self) -> float:
        """Share of the newest admissions' context tokens that a running request lent."""
        return self._prefill.hit_rate

    def add(self, request: Request) -> None:
        """Queue a request; refuses it when the queue is full."""
        free = self.limits.max_running - len(self.running)
        if len(self.waiting) >= self.limits.max_queued + free:
            self._emit(request, Refused(503, QUEUE_FULL))
        else:
            self.waiting.append(request)

    def abort(self, matches: Callable[[Request], bool]) -> None:
        """End every matching request with the tokens that it has."""
        for request in [r for r in self.waiting if matches(r)]:
            self.waiting.remove(request)
            self._finish_waiting(request)
        self._end_running((r, aborted()) for r in list(self.running) if matches(r))

    def retract(self) -> None:
        """Send all running requests back to the queue's front; tokens stay, KV goes."""
        for request in reversed(list(self.running)):
            request.kept_ids, request.kept_logprobs = self._outputs(request)
            request.num_retractions += 1
            self.waiting.appendleft(request)
            self._release(request)

    def num_requests(self) -> int:
        """Waiting and running requests."""
        return len(self.waiting) + len(self.running)

    def weights_changed(self, version: str | None) -> None:
        """KV computed so far must not serve new requests."""
        self._prefill.forget()
        if version is not None:
            self.weight_version = version

    def expire(self) -> None:
        """Refuse what waited, and end what ran, longer than allowed."""
        now = time.monotonic()
        waiting_s, running_s = self.limits.waiting_timeout_s, self.limits.running_timeout_s
        if waiting_s is not None:
            for request in [r for r in self.waiting if now - r.arrived > waiting_s]:
                self.waiting.remove(request)
                self._emit(request, Refused(503, WAITING_TIMEOUT))
        if running_s is not None:
            for request in [r for r in self.running if now - r.started > running_s]:
                self._release(request)
                self._emit(request, Refused(503, RUNNING_TIMEOUT))

    def turn(self) -> bool:
        """Admit, then decode one token for every running request. False: nothing left to do."""
        self.expire()
        if self.paused:
            return False
        self._admit()
        if self.running:
            self._step()
        return self.num_requests() > 0

    def _admit(self) -> None:
        if not self.waiting:
            return
        picked: list[Request] = []
        self.rows.refresh()
        width = self.rows.max_need
        while self.waiting and len(self.running) + len(picked) < self.limits.max_running:
            width = max(width, self.waiting[0].need)
            # The first request always fits: longer ones are refused before they get here.
            if not self.cache.fits(len(self.running) + len(picked) + 1, width):
                break
            picked.append(self.waiting.popleft())
        if not picked:
            return
        live = len(self.running)
        self._make_room(live + len(picked), max(r.known_length for r in picked), width, live)
        now = time.monotonic()
        for request in picked:
            request.started = request.started or now
        self._prefill.run(picked, self.rows)
        done = [r for r in picked if r.sampling.max_new_tokens == 0]
        self._end_running((r, {"type": "length", "length": 0}) for r in done)

    def _step(self) -> None:
        rows, n = self.rows, len(self.running)
        computed = n if self._fixed_length is None else rows.size
        positions = rows.column("position", computed)
        rows.refresh()
        self._make_room(n, int(positions.max()) + 1, rows.max_need, n)
        tokens = rows.column("token", computed)
        logits = self.decoder.decode(tokens, positions, self.cache)[:n].float()
        if rows.holds_back_stops:
            self._hold_back_stops(logits)
        torch.set_num_threads(self.decoder.num_threads)
        chosen, logprobs = sample(logits, rows.sampling(), rows.plain)
        live = rows.column("position")
        live += 1
        rows.column("step").add_(1)
        rows.column("token").copy_(chosen)
        slots = torch.arange(n)
        self.cache.tokens[slots, live] = chosen
        self.cache.logprobs[slots, live] = logprobs
        self.generated_tokens += n
        self._finish_ended(chosen)

    def _make_room(self, slots: int, length: int, need: int, live: int) -> None:
        """Let the cache follow the longest request; in deterministic mode it never changes."""
        if self._fixed_length is None:
            longest = int(self.rows.column("position").max()) + 1 if live else 0
            self.cache.ensure(slots, max(length, longest), need, live)

    def _hold_back_stops(self, logits: torch.Tensor) -> None:
        """Rows below ``min_new_tokens`` cannot choose a token that ends the response."""
        for request in self.running:
            sampling = request.sampling
            if int(self.rows.integers["step"][request.slot]) < sampling.min_new_tokens:
                logits[request.slot, list(sampling.stop_token_ids)] = float("-inf")

    def _finish_ended(self, chosen: torch.Tensor) -> None:
        rows = self.rows
        full = rows.column("step") >= rows.column("max_new")
        stopped = (rows.stops[: len(chosen)] == chosen.unsqueeze(1)).any(1)
        ended: dict[int, dict[str, Any]] = {}
        for slot in (full | stopped).nonzero().flatten().tolist():
            # SGLang looks at the length first: EOS as the last allowed token is "length".
            if full[slot]:
                length = rows.requests[slot].sampling.max_new_tokens
                ended[slot] = {"type": "length", "length": length}
            else:
                ended[slot] = {"type": "stop", "matched": int(chosen[slot])}
        for request in rows.watched:
            self._watch(request, ended)
        if ended:
            requests = list(rows.requests)
            self._end_running((requests[slot], reason) for slot, reason in ended.items())

    def _watch(self, request: Request, ended: dict[int, dict[str, Any]]) -> None:
        """Stop strings and streaming: the only requests looked at one by one."""
        slot, strings = request.slot, request.sampling.stop_strings
        if strings and slot not in ended:
            # Every token has at least one byte, so this tail holds any match that just ended.
            tail = max(len(text.encode()) for text in strings) + 1
            matched = self._matched_string(strings, self._tail(request, tail))
            if matched is not None:
                ended[slot] = {"type": "stop", "matched": matched}
        if request.stream and slot not in ended:
            position = int(self.rows.integers["position"][slot])
            token = int(self.cache.tokens[slot, position])
            logprob = float(self.cache.logprobs[slot, position])
            self._emit(request, Tokens([token], [logprob], self.weight_version))

    def _tail(self, request: Request, length: int) -> list[int]:
        """At most ``length`` newest output tokens."""
        position = int(self.rows.integers["position"][request.slot])
        first = max(request.context_length, position + 1 - length)
        fresh: list[int] = self.cache.tokens[request.slot, first : position + 1].tolist()
        missing = length - len(fresh)
        return (request.kept_ids[-missing:] if missing > 0 else []) + fresh

    def _outputs(self, request: Request) -> tuple[list[int], list[float]]:
        span = slice(request.context_length, int(self.rows.integers["position"][request.slot]) + 1)
        ids = self.cache.tokens[request.slot, span].tolist()
        logprobs = self.cache.logprobs[request.slot, span].tolist()
        return request.kept_ids + ids, request.kept_logprobs + logprobs

    def _end_running(self, endings: Iterable[tuple[Request, dict[str, Any]]]) -> None:
        for request, reason in list(endings):
            ids, logprobs = self._outputs(request)
            experts = self._experts(request)
            self._release(request)
            self._emit(request, Finished(reason, ids, logprobs, self.weight_version, True, experts))

    def _finish_waiting(self, request: Request) -> None:
        admitted = request.num_retractions > 0
        reason = aborted() if admitted else aborted_in_queue()
        kept = (request.kept_ids, request.kept_logprobs)
        self._emit(request, Finished(reason, *kept, self.weight_version, admitted))

    def _experts(self, request: Request) -> bytes | None:
        """Routed experts int32 (fed tokens, layers, top_k), C order; fed = prompt + output - 1."""
        if self.cache.experts is None or not request.want_experts:
            return None
        fed = int(self.rows.integers["position"][request.slot])
        return self.cache.experts[request.slot, :fed].contiguous().numpy().tobytes()

    def _release(self, request: Request) -> None:
        """Free the slot; the last slot's request moves into the hole."""
        slot = request.slot
        request.slot = -1
        self._prefill.leave(request)
        source = self.rows.drop(slot)
        if source is not None:
            length = int(self.rows.integers["position"][slot]) + 1
            self.cache.move(source, slot, min(length, self.cache.capacity))

    @staticmethod
    def _fixed_rows(max_running: int) -> int:
        return round_up(max_running, FIXED_ROWS_STEP)
