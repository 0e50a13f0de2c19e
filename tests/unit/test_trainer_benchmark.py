"""What the trainer's benchmark measures, and how it sorts kernels; that it runs is for a GPU."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return load("kernel_profile")


@pytest.fixture(scope="module")
def benchmark(kernels: ModuleType) -> ModuleType:
    return load("trainer_throughput")


ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"


@pytest.mark.parametrize(
    ("name", "kind", "short"),
    [
        (f"{ELEMENTWISE}CUDAFunctor_add<float>, std::array<char*, 3ul> >(int, "
         "at::native::CUDAFunctor_add<float>)", "elementwise", "CUDAFunctor_add"),
        (f"{ELEMENTWISE}direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda()#3}}>",
         "casts", "direct_copy_kernel_cuda"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, "
         "at::native::func_wrapper_t<float, at::native::sum_functor<float> > > >(int)",
         "reductions", "sum_functor"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128> >(int)",
         "attention forward", None),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<128>(int)",
         "attention backward", None),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "products", None),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "generated",
         "triton_red_fused__to_copy_add_me"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >()",
         "optimizer", None),
        ("Memcpy DtoD (Device -> Device)", "copies", None),
    ],
)  # fmt: skip
def test_kernels_are_sorted_by_their_names(
    kernels: ModuleType, name: str, kind: str, short: str | None
) -> None:
    assert kernels.kernel_kind(name) == kind
    assert short is None or kernels.short(name) == short


def test_a_profile_has_twenty_lines_and_all_of_its_time(kernels: ModuleType) -> None:
    named = [kernels.Kernel(f"op_{i}", float(i), 2) for i in range(40)]
    named += [kernels.Kernel("nvjet_1", 100.0, 7), kernels.Kernel("flash_fwd_kernel", 50.0, 1)]
    seen = kernels.Profile(named, {"mlp": 60.0, "head": 40.0}, wall_ms=1000.0)
    lines = seen.table().splitlines()
    assert len(lines) == kernels.LINES
    assert lines[1].split()[-1] == "930.0"
    assert lines[2].split() == ["elementwise", "780.0", "83.9%", "80"]
    assert [line.split()[0] for line in lines[3:8]] == [
        "products", "mlp", "head", "attention", "op_39",
    ]  # fmt: skip
    told = seen.as_json()
    assert told["products: mlp"] == 60.0
    assert told["busy"] == sum(told[kind] for kind in seen.kinds()) == 930.0


def test_products_belong_to_a_part_of_the_model(kernels: ModuleType) -> None:
    shape = {"vocab_size": 500, "intermediate_size": 96}
    assert kernels.product_kind([[64, 32], [32, 500]], shape) == "head"
    assert kernels.product_kind([[64, 32], [32, 96]], shape) == "mlp"
    assert kernels.product_kind([[64, 32], [32, 32]], shape) == "attention projections"


def told(benchmark: ModuleType, **values: Any) -> argparse.Namespace:
    asked = {"standard": True, "tiny": False, "device": "cuda", "chunk_tokens": [8192]}
    asked["attention"] = ["flash4"]
    return argparse.Namespace(**asked | values)


def test_the_standard_cases_are_every_way_of_computing(benchmark: ModuleType) -> None:
    found = list(benchmark.cases(told(benchmark)))
    largest = {(c.compile, c.checkpointing) for c in found if c.tokens == 65536}
    assert largest == {(a, b) for a in (True, False) for b in (True, False)}
    assert {c.compile for c in found if c.tokens == 16384} == {True, False}
    on_cpu = list(benchmark.cases(told(benchmark, device="cpu", tiny=True)))
    assert {c.compile for c in on_cpu} == {False}
    assert {c.tokens for c in on_cpu} == {1024, 256}


def test_documents_are_as_many_tokens_as_asked_for(benchmark: ModuleType) -> None:
    lengths = benchmark.Lengths(512, 4096, 128)
    for tokens in (16384, 65536):
        found = benchmark.document_lengths(tokens, lengths)
        assert sum(found) == tokens
        assert min(found) >= 512
        assert max(found) <= 4096
        assert len(found) % benchmark.SIBLINGS == 0


def test_operations_of_an_update_by_hand(benchmark: ModuleType) -> None:
    shape = {
        "hidden_size": 8, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": 100,
    }  # fmt: skip
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k and v, o, mlp
    products = 6 * 3 * weights * 12 + 6 * 8 * 100 * (12 - 2 * 2)
    pairs = 5 * 6 // 2 + 7 * 8 // 2
    expected = products + 12 * 3 * 8 * pairs
    assert benchmark.update_operations(shape, [5, 7], prompt=2) == expected


def test_a_table_names_what_was_not_measured(benchmark: ModuleType) -> None:
    case = {
        "tokens": 65536, "micro_batch_tokens": 16384, "compile": True, "checkpointing": False,
        "attention": "flash4",
    }  # fmt: skip
    figures = {
        "seconds": 1.5, "tokens_per_second": 43690.7, "mfu": 0.2, "peak_gib": 50.0,
        "estimated_gib": 51.04,
    }  # fmt: skip
    *_, measured, left_out = benchmark.table([case | figures, case | {"error": "no time left"}])
    assert measured == (
        "| 65,536 | 16,384 | flash4 | yes | no | 1.500 | 43,691 | 0.200 | 50.0 (51.0) |"
    )
    assert "| no time left |" in left_out


def test_a_budget_counts_from_the_start_of_the_process(benchmark: ModuleType) -> None:
    assert benchmark.Budget(0.0).left < 0
    assert 0 < benchmark.Budget(1e6).left < 1e6
