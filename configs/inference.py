"""``[inference]``: the engines and how they sample."""

from typing import Literal, TypeAlias

from pydantic import Field

from configs.section import Section

Scalar: TypeAlias = str | int | float | bool
Argument: TypeAlias = Scalar | tuple[Scalar, ...]
"""Value of a server argument: true is a bare flag, false leaves it out, a list several values."""


class InferenceSection(Section):
    """``[inference]``."""

    engine: Literal["native", "sglang"] = "native"
    """Engine back end; both speak the same HTTP contract."""
    num_engines: int = Field(default=1, ge=1)
    """Engine servers."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs over which one SGLang engine splits the model."""
    sglang: dict[str, Argument] = Field(default_factory=dict)
    """Further arguments of SGLang servers by SGLang's own names with underscores, such as
    mem_fraction_static; true is a flag, a list several values. Names that Perdure sets itself are
    refused, unknown ones before a server starts."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights and arithmetic of the engines."""
    num_threads: int | None = Field(default=None, ge=1)
    """Torch threads of an engine; default: all cores when sequential, else its share."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature in training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1.0: off."""
    top_k: int = Field(default=-1, ge=-1)
    """Top-k sampling; -1: off."""
    max_response_length: int = Field(default=256, ge=1)
    """New tokens at most."""
    max_running_requests: int = Field(default=64, ge=1)
    """Requests that one engine decodes at once."""
    max_queued_requests: int = Field(default=4096, ge=1)
    """Requests waiting in one engine; above it answers 503."""
    kv_cache_mib: int = Field(default=2048, ge=1)
    """Keys and values of all requests of one engine at most, in MiB; requests beyond it wait. On
    a GPU inference.sglang.mem_fraction_static decides instead."""
    server_concurrency: int = Field(default=64, ge=1)
    """Generation calls that the producer keeps open per engine."""
    deterministic: bool = False
    """Decode in batches of one fixed shape: a response does not depend on its neighbors."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one generation request, queueing included."""
    start_timeout_s: float = Field(default=420.0, gt=0)
    """Deadline for an engine to become healthy. SGLang compiles kernels for a minute or two when
    it starts on a machine for the first time."""
    update_timeout_s: float = Field(default=180.0, gt=0)
    """Deadline for an engine to load and confirm new weights."""
    drain_timeout_s: float = Field(default=180.0, gt=0)
    """Deadline for admitted requests to finish before an evaluation or a rolling publication."""
    router_max_queued_requests: int = Field(default=4096, ge=1)
    """Requests waiting in the router of a fully async run; above it answers 503."""
