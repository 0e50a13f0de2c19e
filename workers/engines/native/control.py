"""The control calls: pause, continue, abort, flush, weight updates, checksums, information."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from activities.wire.contract import CHECKSUM_ACTIONS
from workers.engines.native.answers import ServerError, json_response
from workers.engines.native.core import Core, UpdateResult
from workers.engines.native.gate import Gate
from workers.engines.native.gauges import CONTENT_TYPE, metrics_text
from workers.engines.native.generation import Generation
from workers.engines.native.model_shape import ModelShape
from workers.engines.native.model_thread import ModelThread
from workers.engines.native.occupation import TAGS
from workers.engines.native.options import EngineOptions
from workers.engines.native.payload import parse_body
from workers.engines.native.tensor_handles import LOAD_FORMAT, opened

PAUSE_MODES = ("abort", "retract", "in_place")
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details."
    " (When there are running or waiting requests, the operation will not be performed.)\n"
)
FLUSH_POLL_S = 0.02


class Control:
    """Handlers of everything but ``/generate``."""

    def __init__(
        self,
        options: EngineOptions,
        shape: ModelShape,
        context_length: int,
        model: ModelThread,
        gate: Gate,
        generation: Generation,
    ) -> None:
        self._options, self._shape, self._context_length = options, shape, context_length
        self._model, self._gate, self._generation = model, gate, generation
        self._update_lock = asyncio.Lock()
        self.ready_after_s = 0.0
        """Seconds from the start of the process to the loaded model."""

    @property
    def serving(self) -> bool:
        """Loaded, alive and not on the way out."""
        model = self._model
        return model.loaded.done() and not model.ended.done() and not self._generation.stopping

    async def health(self, _: HttpRequest) -> Response:
        """200 while serving, also while paused (SGLang's turns 503 after 20 s of a pause)."""
        return Response(status_code=200 if self.serving else 503)

    async def ping(self, _: HttpRequest) -> Response:
        """The web server alone."""
        return Response(status_code=200)

    async def model_info(self, _: HttpRequest) -> Response:
        """Model, weight version and limits."""
        path, version = await self._model.call(
            lambda core: (str(core.model_path), core.scheduler.weight_version)
        )
        return json_response(
            {
                "model_path": path,
                "tokenizer_path": str(self._options.model_path),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self._shape.model_type,
                "architectures": list(self._shape.architectures),
                "engine": "native",
                "max_model_len": self._context_length,
                "vocab_size": self._shape.vocab_size,
            }
        )

    async def server_info(self, _: HttpRequest) -> Response:
        """Options and the scheduler's state."""
        loads, weight_version, num_bytes = await self._model.call(
            lambda core: (core.loads(), core.scheduler.weight_version, core.weights.num_bytes())
        )
        options = self._options
        return json_response(
            {
                "version": distribution_version("perdure"),
                "engine": "native",
                "model_path": str(options.model_path),
                "weight_version": weight_version,
                "dtype": options.dtype,
                "num_threads": options.num_threads,
                "context_length": self._context_length,
                "max_running_requests": options.max_running_requests,
                "max_queued_requests": options.max_queued_requests,
                "max_total_num_tokens": loads["max_total_num_tokens"],
                "max_req_input_len": self._context_length - 1,
                "enable_deterministic_inference": options.deterministic,
                "enable_return_routed_experts": options.return_routed_experts,
                "enable_memory_saver": True,
                "startup_time": {"total": self.ready_after_s},
                "num_gated_requests": self._gate.num_held,
                "weight_bytes": num_bytes,
                "internal_states": [
                    {"last_gen_throughput": loads["gen_throughput"], "paused": loads["paused"]}
                ],
            }
        )

    async def loads(self, _: HttpRequest) -> Response:
        """One entry, as there is one data-parallel rank."""
        loads = await self._model.call(lambda core: core.loads())
        entry = {"timestamp": time.time(), "dp_rank": 0} | loads
        entry["queues"] = {"waiting": loads["num_waiting_reqs"], "paused": self._gate.num_held}
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": distribution_version("perdure"),
                "accelerator": "cpu",
                "loads": [entry],
            }
        )

    async def metrics(self, _: HttpRequest) -> Response:
        """Prometheus text."""
        loads, version = await self._model.call(
            lambda core: (core.loads(), core.scheduler.weight_version)
        )
        text = metrics_text(loads, self._options.model_path.name, version)
        return Response(text, media_type=CONTENT_TYPE)

    async def abort_request(self, http: HttpRequest) -> Response:
        """End all requests, or one that is here with those that its id prefixes. Always 200."""
        body = parse_body(await http.body())
        rid = body.get("rid") or None
        if rid is not None and not isinstance(rid, str):
            raise ServerError("1 validation error: rid: Input should be a valid string")
        if body.get("abort_all") or (rid is not None and self._generation.knows(rid)):
            target = None if body.get("abort_all") else rid
            self._gate.abort(target)
            await self._model.call(lambda core: core.abort(target))
        return Response(status_code=200)

    async def pause(self, http: HttpRequest) -> Response:
        """Close the gate, then stop decoding."""
        mode = parse_body(await http.body()).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ServerError(
                "1 validation error: mode: Input should be 'abort', 'retract' or 'in_place'"
            )
        self._gate.pause()
        await self._model.call(lambda core: core.pause(mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, http: HttpRequest) -> Response:
        """Decode again, then open the gate."""
        parse_body(await http.body())
        await self._model.call(lambda core: core.resume())
        self._gate.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, http: HttpRequest) -> Response:
        """200 when idle; ``?timeout=S`` waits for that."""
        told = http.query_params.get("timeout")
        try:
            timeout_s = float(told or 0.0)
        except ValueError as error:
            raise ServerError("1 validation error: timeout: not a number of seconds") from error
        deadline = time.monotonic() + timeout_s
        while not await self._model.call(lambda core: core.flush()):
            if time.monotonic() >= deadline:
                waited = "Timed out waiting for idle state.\n"
                return PlainTextResponse(waited if told else "Flush cache failed.\n", 400)
            await asyncio.sleep(FLUSH_POLL_S)
        return PlainTextResponse(FLUSHED)

    async def update_weights_from_disk(self, http: HttpRequest) -> Response:
        """Load a folder in place; unpaused, it first waits for all running requests."""
        body = parse_body(await http.body())
        folder = body.get("model_path")
        if not isinstance(folder, str) or not folder:
            raise ServerError("1 validation error: model_path: Input should be a valid string")
        flush = body.get("flush_cache", True) is not False
        named = _weight_version(body)
        return await self._update(body, lambda core: core.update(Path(folder), named, flush))

    async def update_weights_from_tensor(self, http: HttpRequest) -> Response:
        """Overwrite the parameters in a bucket of shared memory; without a version, more follow."""
        body = parse_body(await http.body())
        payloads, version = body.get("serialized_named_tensors"), _weight_version(body)
        if not isinstance(payloads, list) or len(payloads) != 1:
            raise ServerError(
                "1 validation error: serialized_named_tensors: Input should be a list of one"
            )
        if body.get("load_format") != LOAD_FORMAT:
            raise ServerError(f"load_format must be {LOAD_FORMAT!r} at the native engine")
        tensors = opened(str(payloads[0]))
        flush = body.get("flush_cache", True) is not False
        return await self._update(body, lambda core: core.update_tensors(tensors, version, flush))

    async def _update(
        self, body: dict[str, Any], update: Callable[[Core], UpdateResult]
    ) -> Response:
        """Do ``update`` between two steps of the model, after those before it."""
        async with self._update_lock:
            if body.get("abort_all_requests"):
                await self._model.call(lambda core: core.abort(None))
            async with self._gate.update():
                result = await self._model.call(update)
        answer = {
            "success": result.success,
            "message": result.message,
            "num_paused_requests": result.num_paused,
        }
        return json_response(answer, 200 if result.success else 400)

    async def release_memory_occupation(self, http: HttpRequest) -> Response:
        """Give memory back by tag; 400 unless paused without requests."""
        tags = _tags(parse_body(await http.body()))
        await self._model.call(lambda core: core.occupation.release(tags))
        return json_response(None)

    async def resume_memory_occupation(self, http: HttpRequest) -> Response:
        """Take memory back by tag; weights are zero until they are loaded."""
        tags = _tags(parse_body(await http.body()))
        await self._model.call(lambda core: core.occupation.resume(tags))
        return json_response(None)

    async def update_weight_version(self, http: HttpRequest) -> Response:
        """Rename the weights; ``abort_all_requests`` ends what runs first."""
        body = parse_body(await http.body())
        version = body.get("new_version")
        if not isinstance(version, str):
            raise ServerError("1 validation error: new_version: Input should be a valid string")
        if body.get("abort_all_requests"):
            await self._model.call(lambda core: core.abort(None))
        await self._model.call(lambda core: core.set_version(version))
        message = f"Weight version updated to {version}"
        return json_response({"success": True, "message": message, "new_version": version})

    async def weights_checker(self, http: HttpRequest) -> Response:
        """Checksums of the live weights by HF name."""
        action = parse_body(await http.body()).get("action")
        if action == CHECKSUM_ACTIONS["xxh3_64"]:
            checksums = await self._model.call(lambda core: core.checksums())
        elif action == CHECKSUM_ACTIONS["fingerprint"]:
            checksums = await self._model.call(lambda core: core.fingerprints())
        else:
            known = ", ".join(CHECKSUM_ACTIONS.values())
            message = f"Unknown action {action!r}: the native engine knows {known}."
            return json_response({"success": False, "message": message, "ranks": []}, 400)
        ranks = [{"checksums": checksums}]
        return json_response({"success": True, "message": "Success.", "ranks": ranks})


def _weight_version(body: dict[str, Any]) -> str | None:
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise ServerError("1 validation error: weight_version: Input should be a valid string")
    return version


def _tags(body: dict[str, Any]) -> frozenset[str]:
    """``tags`` of a request that moves memory; empty: all that the engine has."""
    tags = body.get("tags") or []
    if not isinstance(tags, list) or any(tag not in sorted(TAGS) for tag in tags):
        raise ServerError(
            f"1 validation error: tags: Input should be a list of {', '.join(sorted(TAGS))}"
        )
    return frozenset(tags)
