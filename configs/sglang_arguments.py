"""``[inference.sglang]``: arguments of an SGLang server, by SGLang's names with underscores.

The table is for what Perdure has no key for. What Perdure decides itself is refused here, with the
key that governs it. Whether a name exists at all only an installed SGLang can say; it is asked
before a server starts.
"""

import re
from collections.abc import Iterator

from configs.problem import Problem
from configs.run import RunSpec
from configs.sglang_model_checks import serving_problems

TABLE = "inference.sglang"
_NAME = re.compile(r"[a-z][a-z0-9_]*")

_ONE_SERVER = "an engine is one server on one machine; add engines with inference.num_engines"
_CUT = (
    "weights that are spread that way over processes cannot be confirmed; an engine takes several "
    "GPUs with inference.tensor_parallel_size"
)
_PROTOCOL = "Perdure speaks plain HTTP to the server's own port on this machine; remove it"
_REQUESTS = "every request brings its own sampling settings, from [inference] and [evaluation]"
_WEIGHTS = "engines serve the prepared model and then what the trainer publishes; see model.source"
_GENERATES = "the server must generate, by itself, from token ids; remove it"

RESERVED = {
    **dict.fromkeys(("model_path", "model", "tokenizer_path", "revision", "load_format"), _WEIGHTS),
    **dict.fromkeys(
        ("weight_version", "custom_weight_loader", "delete_ckpt_after_loading", "download_dir"),
        _WEIGHTS,
    ),
    "json_model_override_args": "the trainer computes the same model; change its config.json",
    "trust_remote_code": "code of a model folder is never run; use a model that SGLang knows",
    "quantization": "weights are published as they are; use inference.dtype",
    "dtype": "use inference.dtype",
    "context_length": "use core.max_context_length",
    "allow_auto_truncate": "a prompt that does not fit must be refused, not cut; remove it",
    "max_running_requests": "use inference.max_running_requests",
    "max_queued_requests": "use inference.max_queued_requests",
    "enable_deterministic_inference": "use inference.deterministic",
    "enable_return_routed_experts": "use training.use_rollout_routing_replay",
    **dict.fromkeys(
        ("tp_size", "tensor_parallel_size", "tp"), "use inference.tensor_parallel_size"
    ),
    **dict.fromkeys(
        (
            *("dp_size", "data_parallel_size"),
            *("nnodes", "node_rank", "dist_init_addr", "nccl_init_addr", "nccl_port", "use_ray"),
        ),
        _ONE_SERVER,
    ),
    **dict.fromkeys(
        (
            *("pp_size", "pipeline_parallel_size", "pp_max_micro_batch_size"),
            *("ep_size", "expert_parallel_size", "ep", "moe_a2a_backend", "dwdp_size"),
            *("moe_dp_size", "moe_data_parallel_size", "moe_dense_tp_size"),
            *("attn_cp_size", "attention_context_parallel_size"),
            *("dcp_size", "decode_context_parallel_size"),
            *("enable_dp_attention", "enable_dp_lm_head", "enable_eplb"),
        ),
        _CUT,
    ),
    **dict.fromkeys(
        ("device", "base_gpu_id", "gpu_id_step", "enable_memory_saver"), "use placement.mode"
    ),
    **dict.fromkeys(
        (
            *("host", "port", "fastapi_root_path", "grpc_port", "grpc_mode", "smg_grpc_mode"),
            *("enable_http2", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "enable_ssl_refresh"),
            *("ssl_keyfile_password", "api_key", "admin_api_key", "config"),
        ),
        _PROTOCOL,
    ),
    **dict.fromkeys(("preferred_sampling_params", "sampling_defaults"), _REQUESTS),
    **dict.fromkeys(("stream_interval", "incremental_streaming_output"), "answers come whole"),
    **dict.fromkeys(
        (
            *("is_embedding", "encoder_only", "language_only", "disaggregation_mode"),
            *("skip_tokenizer_init", "tokenizer_worker_num", "detokenizer_worker_num"),
        ),
        _GENERATES,
    ),
    "speculative_algorithm": "draft models are not published with the policy; remove it",
}
"""Argument -> why it is Perdure's to set, or what to use instead."""


def sglang_problems(spec: RunSpec) -> Iterator[Problem]:
    """What the run file shows to be wrong with SGLang engines, or said of another engine."""
    inference = spec.inference
    if inference.engine != "sglang":
        yield from _of_another_engine(spec)
        return
    for name, value in inference.sglang.items():
        key = f"{TABLE}.{name}"
        if not _NAME.fullmatch(name):
            written = name.lstrip("-").replace("-", "_").lower()
            remedy = f"write {written}" if _NAME.fullmatch(written) else ""
            yield Problem(
                key, "arguments are lower-case words joined by underscores", value, remedy
            )
        elif name in RESERVED:
            yield Problem(key, "is set by Perdure itself", value, RESERVED[name])
    yield from serving_problems(spec)
    if spec.placement.mode == "cpu":
        yield from _without_gpu(spec)


def _of_another_engine(spec: RunSpec) -> Iterator[Problem]:
    inference = spec.inference
    remedy = 'set inference.engine = "sglang" or remove the key'
    if inference.sglang:
        yield Problem(TABLE, f"the engine is {inference.engine!r}", inference.sglang, remedy)
    if inference.tensor_parallel_size > 1:
        yield Problem(
            "inference.tensor_parallel_size",
            f"the {inference.engine} engine computes in one process",
            inference.tensor_parallel_size,
            remedy,
        )


def _without_gpu(spec: RunSpec) -> Iterator[Problem]:
    inference = spec.inference
    if inference.tensor_parallel_size > 1:
        yield Problem(
            "inference.tensor_parallel_size",
            'splits a model over GPUs, and placement.mode = "cpu" has none',
            inference.tensor_parallel_size,
            "use 1, or another placement.mode",
        )
    if inference.deterministic:
        yield Problem(
            "inference.deterministic",
            'SGLang has that on GPUs only, and placement.mode = "cpu" has none',
            True,
            "remove the key, or use another placement.mode",
        )
