"""``GET /metrics``: Prometheus text, SGLang's names first, Perdure's own after them."""

from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(loads: dict[str, Any], model_name: str, weight_version: str) -> str:
    """Render the scheduler's numbers. ``perdure_policy_version`` is -1 for a non-numeric one."""
    digits = weight_version.removeprefix("v")
    version = int(digits) if digits.isdigit() else -1
    rows = (
        ("sglang:num_running_reqs", "gauge", "Requests that decode", loads["num_running_reqs"]),
        ("sglang:num_queue_reqs", "gauge", "Requests that wait", loads["num_waiting_reqs"]),
        ("sglang:num_used_tokens", "gauge", "KV positions in use", loads["num_used_tokens"]),
        ("sglang:token_usage", "gauge", "Share of the KV budget in use", loads["token_usage"]),
        ("sglang:gen_throughput", "gauge", "Output tokens per second", loads["gen_throughput"]),
        (
            "sglang:cache_hit_rate",
            "gauge",
            "Share of the newest prompts' tokens whose KV was copied",
            loads["cache_hit_rate"],
        ),
        (
            "sglang:generation_tokens_total",
            "counter",
            "Output tokens since the start",
            loads["generated_tokens"],
        ),
        ("perdure_policy_version", "gauge", "Policy version of the weights", version),
        ("perdure_generation_paused", "gauge", "1 while paused", int(loads["paused"])),
    )
    label = '{model_name="' + model_name.replace("\\", "\\\\").replace('"', '\\"') + '"}'
    lines = []
    for name, kind, text, value in rows:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{label} {value}"]
    return "\n".join(lines) + "\n"
