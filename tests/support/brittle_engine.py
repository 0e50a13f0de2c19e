"""An engine that ends, as an SGLang server does, at one wrong request. In memory, behind HTTP.

What kills and what is answered with an error follows SGLang's own sources: an exception in its
scheduler ends all its processes. A request is in the scheduler from its arrival to its end; a
pause closes the gate in front of it, and only the mode ``abort`` empties it.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx

SAMPLING_KEYS = frozenset(
    (
        *("max_new_tokens", "min_new_tokens", "n", "ignore_eos", "sampling_seed"),
        *("temperature", "top_p", "top_k", "min_p"),
        *("stop", "stop_token_ids", "stop_regex", "no_stop_trim", "skip_special_tokens"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
        *("json_schema", "regex", "ebnf", "structural_tag", "stream_interval", "custom_params"),
        "spaces_between_special_tokens",
    )
)
ALL_MEMORY = frozenset(("kv_cache", "weights", "cuda_graph"))
Body = dict[str, Any]


class Killed(Exception):
    """The scheduler failed: the server is gone."""


class BrittleEngine:
    """``died`` says what killed it. ``arrive`` puts requests into it, if its gate is open."""

    def __init__(self, vocab_size: int = 64, context_length: int = 48, ranks: int = 1) -> None:
        self.vocab_size, self.context_length, self.ranks = vocab_size, context_length, ranks
        self.gpus = frozenset(f"GPU-{rank}" for rank in range(ranks))
        self.died: str | None = None
        self.refused: list[str] = []
        """Requests that it answered with an error."""
        self.rids: list[str] = []
        self.version = "default"
        self.cut_in: int | None = None
        """So many requests from now one breaks off: done or not, its answer is lost."""
        self.does_what_is_cut = True
        self.gate_closed = False
        self.in_scheduler = 0
        self.abandoned = 0
        """Requests in the scheduler whose clients are gone: a pause does not wait for them."""
        self.groups: set[str] = set()
        self.released: set[str] = set()
        self._routes: dict[str, Callable[[Body], Any]] = {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_distributed": self._from_distributed,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._set_version,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/model_info": lambda _: {"weight_version": self.version},
            "/server_info": self._server_info,
        }

    def arrive(self, count: int) -> None:
        """Requests of other senders."""
        if not self.gate_closed:
            self.in_scheduler += count

    def hang_up(self) -> None:
        """The clients of all requests are gone."""
        self.abandoned += self.in_scheduler
        self.in_scheduler = 0

    async def handle(self, request: httpx.Request) -> httpx.Response:
        """For ``httpx.MockTransport``."""
        if self.died is not None:
            raise httpx.ConnectError("connection refused")
        body = json.loads(request.content) if request.content else {}
        cut = self._is_cut()
        if cut and not self.does_what_is_cut:
            raise httpx.ReadError("reset")
        try:
            answer = self._routes[request.url.path](body)
        except Killed as cause:
            self.died = f"{request.url.path}: {cause}"
            raise httpx.ReadError("the server hung up") from cause
        except ValueError as error:
            self.refused.append(f"{request.url.path}: {error}")
            return httpx.Response(400, json={"error": {"message": str(error)}})
        if cut:
            raise httpx.ReadError("reset")
        return httpx.Response(200, json=answer)

    def _is_cut(self) -> bool:
        if self.cut_in is None:
            return False
        self.cut_in = self.cut_in - 1 if self.cut_in else None
        return self.cut_in is None

    def _generate(self, body: Body) -> Any:
        sampling, ids = body["sampling_params"], body["input_ids"]
        self.rids.append(body["rid"])
        if unknown := sampling.keys() - SAMPLING_KEYS:
            raise ValueError(f"500: unknown {unknown}")
        if not ids or len(ids) + sampling["max_new_tokens"] > self.context_length:
            raise ValueError("input")
        if not (sampling["temperature"] or 0) >= 0 or not 0 < sampling["top_p"] <= 1:
            raise ValueError("sampling")
        if not 0 <= sampling["min_new_tokens"] <= sampling["max_new_tokens"]:
            raise ValueError("lengths")
        if self.released:
            raise Killed("no memory")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise Killed("token outside the vocabulary")
        if not -(2**31) <= sampling["top_k"] < 2**31:
            raise Killed("top_k is no int32")
        if not -(2**63) <= sampling.get("sampling_seed", 0) < 2**63:
            raise Killed("seed is no int64")
        stops = sampling.get("stop_token_ids") or []
        if sampling["min_new_tokens"] and any(not 0 <= i < self.vocab_size for i in stops):
            raise Killed("stop token outside the logits")
        made = [1] * sampling["max_new_tokens"]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "length", "length": len(made)},
            "weight_version": self.version,
            "output_token_logprobs": [[-1.0, 1, None] for _ in made],
        }
        answer = {"text": "", "output_ids": made, "meta_info": meta}
        return [answer] * sampling["n"] if sampling["n"] > 1 else answer

    def _pause(self, body: Body) -> Any:
        self.gate_closed = True
        if body["mode"] == "abort":
            self.in_scheduler = 0
        return {"status": "ok"}

    def _continue(self, _: Body) -> Any:
        if self.released and (self.in_scheduler or self.abandoned):
            raise Killed("no memory")
        self.gate_closed = False
        return {"status": "ok"}

    def _flush(self, _: Body) -> Any:
        """As with a time-out: it waits for requests that end, not for those that are paused."""
        self.abandoned = 0
        if self.in_scheduler:
            raise ValueError("Timed out waiting for idle state.")

    def _update(self, body: Body) -> Any:
        if "weights" in self.released:
            raise Killed("the weights' memory is given back")
        if not self.gate_closed:
            self.in_scheduler = 0  # it waits for them
        if body.get("flush_cache", True) and (self.in_scheduler or self.abandoned):
            raise Killed("Cache flush failed after updating weights")
        self.version = body.get("weight_version") or self.version
        return {"success": True, "message": "ok"}

    def _from_tensor(self, body: Body) -> Any:
        payloads = body["serialized_named_tensors"]
        if len(payloads) < self.ranks:
            raise Killed("list index out of range")
        if any(each not in self.gpus for each in payloads):
            raise Killed("Invalid device_uuid")
        if body.get("load_format") not in (None, "flattened_bucket"):
            raise Killed("load_format")
        return self._update(body)

    def _from_distributed(self, body: Body) -> Any:
        if body["group_name"] not in self.groups:
            raise Killed("Please call `init_weights_update_group` first.")
        return self._update(body)

    def _init_group(self, body: Body) -> Any:
        if not body["group_name"]:
            raise Killed("Group name cannot be empty")
        if body["group_name"] in self.groups:
            raise ValueError("The specified group name has already been created")
        self.groups.add(body["group_name"])
        return {"success": True, "message": "ok"}

    def _destroy_group(self, body: Body) -> Any:
        found = body["group_name"] in self.groups
        self.groups.discard(body["group_name"])
        return {"success": found, "message": "The group to be destroyed does not exist."}

    def _set_version(self, body: Body) -> Any:
        if body.get("abort_all_requests", True):
            self.in_scheduler = 0
        self.version = body["new_version"]
        return {"success": True, "message": "ok", "new_version": self.version}

    def _release(self, body: Body) -> Any:
        tags = set(body.get("tags") or ALL_MEMORY)
        if self.in_scheduler or self.abandoned:
            raise Killed("release_memory_occupation should be called only when server is idle.")
        if tags & self.released:
            raise Killed("cannot pause an allocation that is not active")
        self.released |= tags
        return None

    def _resume(self, body: Body) -> Any:
        tags = set(body.get("tags") or ALL_MEMORY)
        if tags - self.released:
            raise Killed("KeyError")
        self.released -= tags
        return None

    def _server_info(self, _: Body) -> Any:
        return {
            "tp_size": self.ranks,
            "enable_memory_saver": True,
        }
