"""Everything that owns a tensor, put together. Built and used by the model thread only."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from models.errors import ConfigurationError
from workers.engines.native.decoder import Decoder
from workers.engines.native.kv import KvCache
from workers.engines.native.model_shape import ModelShape, read_model_shape
from workers.engines.native.occupation import TAGS, WEIGHTS, Occupation
from workers.engines.native.options import EngineOptions
from workers.engines.native.request import Emit, Request
from workers.engines.native.scheduler import Limits, Scheduler
from workers.engines.native.text import TextCodec
from workers.engines.native.weights import WeightStore

logger = logging.getLogger(__name__)

UNKNOWN_VERSION = "unknown"
"""Weight version after an update that failed half-way, until the next good one."""
THROUGHPUT_WINDOW_S = 1.0
"""``gen_throughput`` is the rate over at least this much time."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Answer of a weight update; ``num_paused`` requests stayed in the engine."""

    success: bool
    message: str
    num_paused: int


class Core:
    """Weights, decoder and scheduler of one engine."""

    def __init__(
        self,
        options: EngineOptions,
        shape: ModelShape,
        context_length: int,
        codec: TextCodec,
        emit: Emit,
    ) -> None:
        """Allocate and load. Raises ConfigurationError for weights that do not fit the config."""
        dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
        self.shape, self.model_path = shape, options.model_path
        self.weights = WeightStore(shape, dtype)
        self.weights.load(options.model_path)
        cache = KvCache(shape, dtype, options.kv_budget_mib * 2**20, options.return_routed_experts)
        fixed = context_length if options.deterministic else None
        if not cache.fits(options.max_running_requests if fixed else 1, fixed or context_length):
            slots = options.max_running_requests if fixed else 1
            raise ConfigurationError(
                f"--kv-budget-mib {options.kv_budget_mib} holds {cache.max_tokens} tokens, but"
                f" {slots} x --context-length {context_length} are needed: lower one of them or"
                " raise it (inference.kv_cache_mib)"
            )
        limits = Limits(
            max_running=options.max_running_requests,
            max_queued=options.max_queued_requests,
            waiting_timeout_s=options.req_waiting_timeout_s,
            running_timeout_s=options.req_running_timeout_s,
        )
        decoder = Decoder(shape, self.weights, context_length, options.num_threads, bool(fixed))
        self.scheduler = Scheduler(decoder, cache, limits, emit, codec.matched_string, fixed)
        self.scheduler.weight_version = options.weight_version
        self.occupation = Occupation(self.weights, self.scheduler)
        self._rate = (time.monotonic(), 0, 0.0)

    def pause(self, mode: str) -> None:
        """Stop decoding: ``abort`` ends all requests, ``retract`` drops KV, ``in_place`` waits."""
        self.scheduler.paused = True
        if mode == "abort":
            self.scheduler.abort(lambda _: True)
        elif mode == "retract":
            self.scheduler.retract()

    def resume(self) -> None:
        """Decode again. Raises ServerError while memory is released."""
        self.occupation.require(*TAGS)
        self.scheduler.paused = False

    def abort(self, rid: str | None) -> None:
        """End every request whose id starts with ``rid`` (None: all), as SGLang matches."""

        def matches(request: Request) -> bool:
            return rid is None or request.rid.startswith(rid)

        self.scheduler.abort(matches)

    def flush(self) -> bool:
        """False when a request waits or runs; there is no cache beside theirs."""
        return self.scheduler.num_requests() == 0

    def update(self, folder: Path, version: str | None, flush_cache: bool) -> UpdateResult:
        """Load an HF folder in place. Refused, with the old weights kept, unless it fits.

        Raises ServerError while weights are released.
        """
        self.occupation.require(WEIGHTS)
        held = self.scheduler.num_requests()
        if flush_cache and held:
            return UpdateResult(False, _flush_failed(held), held)
        try:
            if (folder / "config.json").is_file():
                found = read_model_shape(folder)
                if found.model_type != self.shape.model_type:
                    raise ConfigurationError(f"{folder} is a {found.model_type} model")
            self.weights.load(folder)
        except ConfigurationError as error:
            # Raised before the first copy.
            return UpdateResult(False, f"Failed to get weights iterator: {error.message}.", held)
        except (OSError, RuntimeError, SafetensorError) as error:
            # The weights are a mixture; no client may take them for a version that it knows.
            self.scheduler.weights_changed(UNKNOWN_VERSION)
            message = (
                f"{error}. The weights are partially updated. Please discard the whole weights."
            )
            return UpdateResult(False, message, held)
        self.model_path = folder
        self.scheduler.weights_changed(version)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        return UpdateResult(True, message, held)

    def update_tensors(
        self, tensors: Mapping[str, Tensor], version: str | None, flush_cache: bool
    ) -> UpdateResult:
        """Overwrite some parameters in place. Refused, with the old weights kept, unless they fit.

        Raises ServerError while weights are released.
        """
        self.occupation.require(WEIGHTS)
        held = self.scheduler.num_requests()
        if flush_cache and held:
            return UpdateResult(False, _flush_failed(held), held)
        try:
            self.weights.load_tensors(tensors)
        except ConfigurationError as error:
            return UpdateResult(False, error.message, held)
        self.scheduler.weights_changed(version)
        return UpdateResult(True, "Success", held)

    def set_version(self, version: str) -> None:
        """Rename the weights without moving any."""
        self.scheduler.weight_version = version

    def checksums(self) -> dict[str, str]:
        """HF name -> xxh3_64 of the live bytes. Raises ServerError while weights are released."""
        self.occupation.require(WEIGHTS)
        return self.weights.checksums()

    def fingerprints(self) -> dict[str, str]:
        """HF name -> fingerprint of the live bytes. Raises ServerError as ``checksums``."""
        self.occupation.require(WEIGHTS)
        return self.weights.fingerprints()

    def loads(self) -> dict[str, Any]:
        """The numbers of ``/v1/loads``, ``/server_info`` and ``/metrics``."""
        scheduler = self.scheduler
        used, capacity = scheduler.num_used_tokens, scheduler.cache.max_tokens
        return {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": used,
            "max_total_num_tokens": capacity,
            "max_running_requests": scheduler.limits.max_running,
            "token_usage": used / max(capacity, 1),
            "gen_throughput": self._throughput(),
            "cache_hit_rate": scheduler.cache_hit_rate,
            "generated_tokens": scheduler.generated_tokens,
            "paused": scheduler.paused,
        }

    def _throughput(self) -> float:
        """Output tokens per second since the last reading, at least a window ago."""
        then, tokens, rate = self._rate
        now, generated = time.monotonic(), self.scheduler.generated_tokens
        if now - then >= THROUGHPUT_WINDOW_S:
            rate = (generated - tokens) / (now - then)
            self._rate = (now, generated, rate)
        return rate


def _flush_failed(held: int) -> str:
    return (
        f"Cache flush failed: {held} requests hold KV. Abort them first or send flush_cache=false."
    )
