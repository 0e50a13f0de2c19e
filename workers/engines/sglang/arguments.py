"""From the run file to the arguments and the environment of an SGLang server. Pure functions."""

from collections.abc import Mapping
from pathlib import Path

from configs.inference import Argument
from configs.run import RunSpec

COLOCATED_FRACTION = 0.5
"""Share of a GPU for weights and keys and values of an engine that a trainer lives beside."""
CONTEXT_MARGIN = 6
"""Positions that SGLang keeps to itself: it refuses an input that leaves fewer, and cuts a response
that would reach the last two. A run's longest prompt and response must fit without them."""
KEEP_ALIVE_S = 60
"""SGLang's own 5 s would close an idle connection of a pooled client under it."""

ON_CPU: Mapping[str, Argument] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
}
"""What a server without a GPU needs."""
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def server_arguments(
    spec: RunSpec,
    model: Path,
    config: Mapping[str, object],
    *,
    with_routes: bool,
    version: int | None = None,
) -> dict[str, Argument]:
    """Server arguments by SGLang's names, host and port left out.

    Args:
        spec: a checked run file.
        model: folder to serve.
        config: content of its ``config.json``.
        with_routes: whether answers shall tell the experts of every token.
        version: policy version that it serves from the start; default: none that counts.
    """
    inference = spec.inference
    arguments: dict[str, Argument] = {
        "model_path": str(model),
        "dtype": inference.dtype,
        "context_length": spec.core.max_context_length + CONTEXT_MARGIN,
        "max_running_requests": inference.max_running_requests,
        "max_queued_requests": inference.max_queued_requests,
        "stream_interval": 1,
        # Else a model's generation_config.json sets what a request leaves out.
        "sampling_defaults": "openai",
        # Not a line for every request.
        "log_level_http": "warning",
    }
    arguments |= _of_placement(spec, config)
    if inference.deterministic:
        arguments["enable_deterministic_inference"] = True
    if with_routes:
        arguments["enable_return_routed_experts"] = True
        # With it SGLang 0.5.17 hands out the routes of the next step: the buffer that they are
        # copied from is overwritten meanwhile.
        arguments["disable_overlap_schedule"] = True
    if version is not None:
        arguments["weight_version"] = str(version)
    return arguments | inference.sglang


def server_environment(spec: RunSpec) -> dict[str, str]:
    """Variables for the server, above all others: they decide what an answer means."""
    variables = {
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        # Log-probs of the temperature that was sampled with; no limit that throws tokens away.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_REQ_RUNNING_TIMEOUT": "-1",
        # SIGTERM would wait for the last request, without a limit.
        "SGL_FORCE_SHUTDOWN": "1",
        # The margin may go beyond the model's positions; no token ever has one of those.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # The model folder is local; nothing is looked up on the network.
        "HF_HUB_OFFLINE": "1",
        # What the server defaults to as a library, and what a trainer's group must match.
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
    }
    if spec.core.publication_mode == "refresh":
        # Responses go on with the tokens of an aborted request. One that was retracted before has
        # those alone that were handed over: every token at once, at the cost of the server's
        # front handling every step of every request. Else an answer is handed over when it ends.
        variables["SGLANG_FORCE_STREAM_INTERVAL"] = "1"
    if spec.placement.mode == "cpu":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    return variables


def flags(arguments: Mapping[str, Argument]) -> list[str]:
    """``arguments`` as a command line: true is a bare flag, false is left out."""
    line: list[str] = []
    for name, value in arguments.items():
        if value is False:
            continue
        line.append(f"--{name.replace('_', '-')}")
        if isinstance(value, tuple | list):
            line += map(str, value)
        elif value is not True:
            line.append(str(value))
    return line


def _of_placement(spec: RunSpec, config: Mapping[str, object]) -> dict[str, Argument]:
    """Devices, and memory for keys and values."""
    inference = spec.inference
    if spec.placement.mode == "cpu":
        tokens = kv_tokens(config, inference.dtype, inference.kv_cache_mib)
        return {**ON_CPU, **({} if tokens is None else {"max_total_tokens": tokens})}
    arguments: dict[str, Argument] = {
        "tp_size": inference.tensor_parallel_size,
        "cuda_graph_max_bs_decode": inference.max_running_requests,
    }
    if spec.placement.mode == "colocated":
        arguments |= {"enable_memory_saver": True, "mem_fraction_static": COLOCATED_FRACTION}
    return arguments


def kv_tokens(config: Mapping[str, object], dtype: str, budget_mib: int) -> int | None:
    """Tokens whose keys and values fit ``budget_mib``; none for a model of another attention.

    One token takes 2 x layers x key-value heads x head size elements.
    """
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    kv_heads = config.get("num_key_value_heads") or heads
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return None
    head_dim = config.get("head_dim") or hidden // heads
    if not (isinstance(kv_heads, int) and isinstance(head_dim, int)):
        return None
    per_token = 2 * layers * kv_heads * head_dim * _ELEMENT_BYTES[dtype]
    return max(1, (budget_mib << 20) // per_token)
