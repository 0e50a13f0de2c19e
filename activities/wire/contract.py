"""The engine contract: SGLang's HTTP payloads, in the part that Perdure uses.

Both sides use this file: the client that asks and the native engine that answers. Field names,
status codes and messages are those of SGLang 0.5.17.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from models.publication import ChecksumKind

GENERATE = "/generate"
ABORT_REQUEST = "/abort_request"
PAUSE_GENERATION = "/pause_generation"
CONTINUE_GENERATION = "/continue_generation"
FLUSH_CACHE = "/flush_cache"
UPDATE_WEIGHTS_FROM_DISK = "/update_weights_from_disk"
UPDATE_WEIGHTS_FROM_TENSOR = "/update_weights_from_tensor"
UPDATE_WEIGHTS_FROM_DISTRIBUTED = "/update_weights_from_distributed"
INIT_WEIGHTS_UPDATE_GROUP = "/init_weights_update_group"
DESTROY_WEIGHTS_UPDATE_GROUP = "/destroy_weights_update_group"
UPDATE_WEIGHT_VERSION = "/update_weight_version"
RELEASE_MEMORY_OCCUPATION = "/release_memory_occupation"
RESUME_MEMORY_OCCUPATION = "/resume_memory_occupation"
WEIGHTS_CHECKER = "/weights_checker"
FREEZE_GC = "/freeze_gc"
CHECKSUM_ACTIONS: Mapping[ChecksumKind, str] = {
    "xxh3_64": "checksum",
    "fingerprint": "fingerprint",
}
"""Actions of ``WEIGHTS_CHECKER``; SGLang itself knows the first, with hashes of its own."""
MODEL_INFO = "/model_info"
SERVER_INFO = "/server_info"
HEALTH = "/health"
LOADS = "/v1/loads"
METRICS = "/metrics"

QUEUE_FULL = "The request queue is full."
WAITING_TIMEOUT = "Request waiting timeout reached."
RUNNING_TIMEOUT = "Request running timeout reached."
PRIORITY_EVICTED = "The request is aborted by a higher priority request."
REQUEST_GATED = "Request {rid} was aborted"
"""Status 499: the request waited at the gate of a paused engine when everything was aborted."""
WORKER_UNAVAILABLE = "Rollout worker unavailable"
NO_HEALTHY_WORKERS = "No healthy rollout workers available"

PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
"""A part of an engine's GPU memory that it can give back while it is paused."""

RID_PATTERN = re.compile("[0-9a-f]{32}")
"""Request ids have one length: aborting an id aborts every id that begins with it."""


class WireModel(BaseModel):
    """Lenient towards fields that a server adds; SGLang ignores unknown top-level fields too."""

    model_config = ConfigDict(extra="ignore")


class SamplingParams(BaseModel):
    """``sampling_params``. Unknown keys are refused before sending: SGLang answers 500."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None
    """Honoured by the native engine always, by SGLang in deterministic mode."""


class GenerateRequest(WireModel):
    """``POST /generate`` for one prompt."""

    rid: str
    """A fixed-length uuid hex: SGLang aborts every id that an aborted one prefixes."""
    input_ids: list[int]
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    return_logprob: bool = True
    logprob_start_len: int = -1
    return_routed_experts: bool = False
    stream: bool = False


class MetaInfo(WireModel):
    """``meta_info`` of an answer. Optional where SGLang leaves fields out."""

    id: str
    finish_reason: dict[str, Any]
    weight_version: str
    weight_versions: list[Any] | None = None
    """Spans ``{version, start, end}`` of an engine that tells which version made which token."""
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    num_retractions: int | None = None
    e2e_latency: float | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None
    routed_experts: str | None = None
    """base64 of int32 (prompt + completion - 1, layers, top_k), C order."""


class GenerateResponse(WireModel):
    """Answer of ``POST /generate``. Train on ``output_ids``; ``text`` is for people."""

    text: str = ""
    output_ids: list[int]
    meta_info: MetaInfo


class WeightUpdate(WireModel):
    """What every weight update may say. ``flush_cache`` ends an engine that holds paused requests.

    Without ``weight_version`` the engine's version stays as it is: more of the update follows.
    """

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class UpdateWeightsFromDisk(WeightUpdate):
    """``POST /update_weights_from_disk``: an HF folder, on disk or in shared memory."""

    model_path: str


class UpdateWeightsFromTensor(WeightUpdate):
    """``POST /update_weights_from_tensor``: handles of tensors on a GPU that the engine sees."""

    serialized_named_tensors: list[str]
    """base64, one a tensor-parallel rank."""
    load_format: str | None = None


class UpdateWeightsFromDistributed(WeightUpdate):
    """``POST /update_weights_from_distributed``: what rank 0 of the group broadcasts, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    load_format: str | None = None


class InitWeightsUpdateGroup(WireModel):
    """``POST /init_weights_update_group``: rank 0 is the sender, it waits at master_address."""

    master_address: str
    master_port: int
    rank_offset: int
    """Rank of the engine's first process in the group."""
    world_size: int
    group_name: str
    backend: str = "nccl"
