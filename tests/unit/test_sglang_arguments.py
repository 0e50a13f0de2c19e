"""From the run file to SGLang's command line, and what the installed SGLang knows of it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from configs.load import resolve_document
from configs.run import RunSpec
from models.errors import ConfigurationError
from tests.support.fake_sglang import write_fake_sglang
from workers.engines.sglang.arguments import (
    flags,
    kv_tokens,
    server_arguments,
    server_environment,
)
from workers.engines.sglang.installed import argument_flags, require_arguments
from workers.engines.sglang.own_head import require_own_head

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "tiny.toml"
MODEL = Path("/models/m")
QWEN3_06B = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 1024,
    "head_dim": 128,
}
ALWAYS = {
    "model_path": "/models/m",
    "dtype": "float32",
    "context_length": 128 + 6,
    "max_running_requests": 256,
    "max_queued_requests": 4096,
    "stream_interval": 1,
    "sampling_defaults": "openai",
    "log_level_http": "warning",
}
ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
}


def spec(mode: str = "cpu", **inference: Any) -> RunSpec:
    document = tomllib.loads(RECIPE.read_text())
    document["inference"] |= {"engine": "sglang", "dtype": "float32"} | inference
    document["core"] |= {"max_context_length": 128}
    document["placement"] = {"mode": mode}
    document["output"]["root"] = "/runs/a"
    return resolve_document(document, origin="tiny.toml").spec


def arguments(run: RunSpec, **told: Any) -> dict[str, Any]:
    return server_arguments(run, MODEL, {}, **({"with_routes": False} | told))


@pytest.mark.parametrize(
    ("run", "told", "more"),
    [
        (spec(), {}, ON_CPU),
        (spec(), {"version": 0}, ON_CPU | {"weight_version": "0"}),
        (
            spec(),
            {"with_routes": True},
            ON_CPU | {"enable_return_routed_experts": True, "disable_overlap_schedule": True},
        ),
        (spec(max_running_requests=300), {}, ON_CPU | {"max_running_requests": 300}),
        (spec(sglang={"disable_radix_cache": True}), {}, ON_CPU | {"disable_radix_cache": True}),
        (spec(sglang={"attention_backend": "x"}), {}, ON_CPU | {"attention_backend": "x"}),
        (
            spec("disaggregated", deterministic=True, tensor_parallel_size=2),
            {},
            {
                "tp_size": 2,
                "cuda_graph_max_bs_decode": 256,
                "enable_deterministic_inference": True,
            },
        ),
        (
            spec("colocated"),
            {},
            {
                "tp_size": 1,
                "cuda_graph_max_bs_decode": 256,
                "enable_memory_saver": True,
                "mem_fraction_static": 0.5,
            },
        ),
        (
            spec("colocated", sglang={"mem_fraction_static": 0.7}),
            {},
            {
                "tp_size": 1,
                "cuda_graph_max_bs_decode": 256,
                "enable_memory_saver": True,
                "mem_fraction_static": 0.7,
            },
        ),
    ],
)
def test_arguments_of_a_run(run: RunSpec, told: dict[str, Any], more: dict[str, Any]) -> None:
    assert arguments(run, **told) == ALWAYS | more


def test_only_a_server_without_a_gpu_is_told_so() -> None:
    assert server_environment(spec())["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(spec("disaggregated"))


@pytest.mark.parametrize(("mode", "told"), [("refresh", "1"), ("barrier", None), ("rolling", None)])
def test_only_responses_that_go_on_under_new_weights_need_every_token_at_once(
    mode: str, told: str | None
) -> None:
    run = spec()
    core = run.core.model_copy(update={"publication_mode": mode})
    environment = server_environment(run.model_copy(update={"core": core}))
    assert environment.get("SGLANG_FORCE_STREAM_INTERVAL") == told


def test_tokens_that_fit_a_budget() -> None:
    """Qwen3-0.6B in bfloat16: 2 x 28 x 8 x 128 x 2 = 114,688 bytes a token."""
    assert kv_tokens(QWEN3_06B, "bfloat16", 7) == 64
    assert kv_tokens(QWEN3_06B, "float32", 7) == 32
    assert kv_tokens({"num_hidden_layers": 2}, "float32", 7) is None


def test_a_command_line() -> None:
    given = {"a_b": True, "off": False, "sizes": (1, 2), "share": 0.5, "text": "x y"}
    assert flags(given) == ["--a-b", "--sizes", "1", "2", "--share", "0.5", "--text", "x y"]


@pytest.mark.parametrize(
    ("inference", "message"),
    [
        ({"sglang": {"tp_size": 2}}, r"sglang\.tp_size = 2.*inference\.tensor_parallel_size"),
        ({"sglang": {"port": 1}}, r"inference\.sglang\.port = 1: is set by Perdure itself"),
        ({"sglang": {"mem-fraction-static": 1}}, r"write mem_fraction_static"),
        ({"deterministic": True}, r"inference\.deterministic = true: SGLang has that on GPUs"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size = 2: splits a model over GPUs"),
        ({"engine": "native", "sglang": {"a": 1}}, r"inference\.sglang = \{\.\.\.\}: the engine"),
        ({"engine": "native", "tensor_parallel_size": 2}, r"computes in one process"),
        ({"sglang": {"a": {"b": 1}}}, r"inference\.sglang\.a"),
    ],
)
def test_what_a_run_file_may_not_say(inference: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        spec(**inference)


def test_the_arguments_of_a_release_are_read_from_its_source(tmp_path: Path) -> None:
    write_fake_sglang(tmp_path)
    known = argument_flags(tmp_path / "sglang")
    assert known == {
        "model_path": "--model-path",
        "model": "--model",
        "host": "--host",
        "port": "--port",
        "mem_fraction_static": "--mem-fraction-static",
        "tp_size": "--tp-size",
        "tensor_parallel_size": "--tensor-parallel-size",
        "cuda_graph_bs_decode": "--cuda-graph-bs-decode",
        "disable_radix_cache": "--disable-radix-cache",
        "reasoning_parser": "--reasoning-parser",
    }


def test_a_source_of_another_shape_is_named(tmp_path: Path) -> None:
    write_fake_sglang(tmp_path)
    (tmp_path / "sglang/srt/server_args.py").write_text("class Other: pass\n")
    with pytest.raises(ConfigurationError, match=r"server_args\.py has no class ServerArgs"):
        argument_flags(tmp_path / "sglang")


def test_every_unknown_argument_is_refused_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = write_fake_sglang(tmp_path)
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    monkeypatch.setenv("PERDURE_SGLANG_PYTHON", environment["PERDURE_SGLANG_PYTHON"])
    require_arguments({"model_path": "/m", "tp_size": 1})
    with pytest.raises(ConfigurationError) as caught:
        require_arguments({"model_path": "/m", "disable_radix": True, "zzz": 1})
    first, second = caught.value.message.splitlines()
    assert first.endswith(
        "inference.sglang.disable_radix = true: the installed SGLang has no such argument; did "
        "you mean 'disable_radix_cache'?"
    )
    assert second.endswith(
        "inference.sglang.zzz = 1: the installed SGLang has no such argument; remove it"
    )


def test_an_interpreter_that_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_SGLANG_PYTHON", "/no/such/python")
    with pytest.raises(ConfigurationError, match=r"/no/such/python \(PERDURE_SGLANG_PYTHON\)"):
        require_arguments({"model_path": "/m"})


def test_a_tied_mixture_is_refused_and_other_models_are_not() -> None:
    require_own_head(MODEL, {"model_type": "qwen3", "tie_word_embeddings": True})
    require_own_head(MODEL, {"model_type": "qwen3_moe", "tie_word_embeddings": False})
    with pytest.raises(ConfigurationError, match=r"tied head; write the embedding a second time"):
        require_own_head(MODEL, {"model_type": "qwen3_moe", "tie_word_embeddings": True})
