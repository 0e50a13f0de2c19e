"""Processes that share one model answer together for the bytes of its files."""

from collections.abc import Iterator
from typing import Any

import cut_model_ranks as cases
import httpx
import pytest
import torch
import xxhash
from cut_model import cut_parameters
from rank_pool import RankPool
from torch import Tensor

from activities.wire.control import EngineControls
from models.errors import ContractViolation
from workers.engines.sglang.live_weights import file_tensors, process_tensors, xxh3_checksums
from workers.fingerprint import fingerprints

DENSE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MIXTURE = DENSE | {"num_experts": 3, "moe_intermediate_size": 20}
LAYER = "model.layers.0"


def model_files(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Random tensors of one decoder layer, under Hugging Face names."""
    generator = torch.Generator().manual_seed(3)
    width, head = config["hidden_size"], config["head_dim"]
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "lm_head.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
        f"{LAYER}.self_attn.q_proj.weight": (queries, width),
        f"{LAYER}.self_attn.k_proj.weight": (keys, width),
        f"{LAYER}.self_attn.v_proj.weight": (keys, width),
        f"{LAYER}.self_attn.o_proj.weight": (width, queries),
        f"{LAYER}.self_attn.q_proj.bias": (queries,),
        f"{LAYER}.self_attn.k_proj.bias": (keys,),
        f"{LAYER}.self_attn.v_proj.bias": (keys,),
        f"{LAYER}.self_attn.o_proj.bias": (width,),
        f"{LAYER}.self_attn.q_norm.weight": (head,),
    }
    mlps = {f"{LAYER}.mlp": config["intermediate_size"]}
    if "num_experts" in config:
        inner = config["moe_intermediate_size"]
        mlps = {f"{LAYER}.mlp.experts.{n}": inner for n in range(config["num_experts"])}
        shapes[f"{LAYER}.mlp.gate.weight"] = (config["num_experts"], width)
    for prefix, inner in mlps.items():
        shapes |= {f"{prefix}.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        shapes[f"{prefix}.down_proj.weight"] = (width, inner)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def expected(files: dict[str, Tensor]) -> dict[str, str]:
    """Hashes of the whole tensors, without the code that is tested."""
    return {
        name: xxhash.xxh3_64_hexdigest(tensor.view(torch.uint8).numpy().tobytes())
        for name, tensor in files.items()
    }


async def merged(answers: list[dict[str, str]]) -> dict[str, str]:
    """What a client makes of the answers of all processes."""
    body = {"success": True, "ranks": [{"checksums": answer} for answer in answers]}

    def serve(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=body)

    engine = EngineControls("http://engine", httpx.MockTransport(serve))
    try:
        return await engine.checksums()
    finally:
        await engine.aclose()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    made = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("base", [DENSE, MIXTURE], ids=["dense", "mixture"])
async def test_processes_name_together_what_the_files_hold(
    pool: RankPool, base: dict[str, Any], size: int, key_heads: int, dtype: torch.dtype
) -> None:
    config = base | {"num_key_value_heads": key_heads}
    files = model_files(config, dtype)
    answers = pool.run(cases.answer, files, config, 1, None, size)[:size]
    assert await merged(answers) == expected(files)
    everywhere = set.intersection(*(set(answer) for answer in answers))
    assert "model.norm.weight" in everywhere
    cut = set(files) - everywhere
    assert f"{LAYER}.self_attn.o_proj.weight" in cut
    # Every tensor that is cut is hashed once, key-value heads once for every holder's copy.
    for name in cut:
        copies = size // key_heads if key_heads < size and name.split(".")[-2][0] in "kv" else 1
        assert sum(name in answer for answer in answers) == copies


@pytest.mark.parametrize("padding", [16, 32])
async def test_padding_is_not_hashed(pool: RankPool, padding: int) -> None:
    config = MIXTURE | {"moe_intermediate_size": 40}
    files = model_files(config, torch.float32)
    answers = pool.run(cases.answer, files, config, padding, None, 2)[:2]
    assert await merged(answers) == expected(files)


@pytest.mark.parametrize("base", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("padding", [1, 32])
def test_one_process_names_what_the_files_hold(base: dict[str, Any], padding: int) -> None:
    files = model_files(base, torch.bfloat16)
    live = cut_parameters(files, base, 0, 1, padding)
    assert xxh3_checksums(file_tensors(live, base)) == expected(files)


async def test_every_hash_is_of_the_whole_tensors(pool: RankPool) -> None:
    files = model_files(MIXTURE, torch.bfloat16)
    answers = pool.run(cases.answer, files, MIXTURE, 1, None, 0, fingerprints)
    assert await merged(answers) == fingerprints(files.items())


async def test_a_byte_in_one_part_changes_the_checksum_of_its_tensor(pool: RankPool) -> None:
    files = model_files(DENSE, torch.float32)
    answers = pool.run(cases.answer, files, DENSE, 1, cases.one_byte_of_a_part)
    found, wanted = await merged(answers), expected(files)
    assert found.keys() == wanted.keys()
    wrong = {name for name in found if found[name] != wanted[name]}
    assert wrong == {f"{LAYER}.self_attn.o_proj.weight"}


@pytest.mark.parametrize("key_heads", [2, 1])
async def test_copies_that_differ_are_refused(pool: RankPool, key_heads: int) -> None:
    config = DENSE | {"num_key_value_heads": key_heads}
    files = {n: t for n, t in model_files(config, torch.float32).items() if "proj.bias" not in n}
    answers = pool.run(cases.answer, files, config, 1, cases.one_byte_of_a_copy)
    with pytest.raises(ContractViolation, match=r"ranks disagree on the bytes of .*v_proj\.weight"):
        await merged(answers)
    answers = pool.run(cases.answer, files, config, 1, cases.one_byte_of_a_whole)
    with pytest.raises(ContractViolation, match=r"ranks disagree on the bytes of model\.norm"):
        await merged(answers)


def test_a_failure_in_one_process_is_the_answer_of_all(pool: RankPool) -> None:
    files = model_files(DENSE, torch.float32)
    answers = pool.run(cases.answer, files, DENSE, 1, None, 0, cases.fails_in_one)
    assert answers == ["no weight checksums: process 3: OutOfMemoryError: no memory left"] * 4
    answers = pool.run(cases.answer, files, DENSE, 1, cases.another_layout, 2)[:2]
    assert answers[0] == answers[1]
    assert "process 0 holds ('model.layers.0.mlp.down_proj.weight'" in answers[0]
    assert "torch.float64" in answers[0]


def test_another_way_to_cut_is_refused(pool: RankPool) -> None:
    files = model_files(DENSE, torch.float32)
    answers = pool.run(cases.answer, files, DENSE, 1, cases.not_cut)
    assert len(set(answers)) == 1
    assert "mlp.down_proj.weight: a process has [24, 40], which is not a part" in answers[0]
    parameters = cut_parameters(files, DENSE, 0, 2)
    with pytest.raises(RuntimeError, match=r"has 32 rows, but 8 heads and 2 .* 32 \+ 8 \+ 8 = 48"):
        dict(process_tensors(parameters, DENSE | {"num_attention_heads": 8}, 2))
    parameters = cut_parameters(model_files(MIXTURE, torch.float32), MIXTURE, 0, 1)
    with pytest.raises(RuntimeError, match="3 of 6 experts"):
        xxh3_checksums(file_tensors(parameters, MIXTURE | {"num_experts": 6}))
