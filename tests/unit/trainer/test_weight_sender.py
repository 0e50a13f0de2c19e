"""The trainer's side of a publication without files: which bytes are offered, and for how much."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from activities.wire.digest import weights_digest
from tests.support.counted_operations import CountedOperations
from workers.fingerprint import fingerprints
from workers.trainers.ranks import SingleRank
from workers.trainers.sending import WeightSender
from workers.trainers.weights import named_weights

SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def dense() -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def sender_of(model: torch.nn.Module, folder: Path, bucket_bytes: int = 1 << 20) -> WeightSender:
    return WeightSender(
        model, SingleRank(), torch.bfloat16, bucket_bytes, "ipc", lambda _: folder / "m" / "bucket"
    )


def data_of(tensors: list[torch.Tensor]) -> bytes:
    cast = [tensor.detach().to(torch.bfloat16).contiguous() for tensor in tensors]
    return b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in cast)


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    """One tensor after the other, each cast by itself."""
    return weights_digest(
        {
            name: fingerprints([(name, tensor.detach().to(torch.bfloat16))])[name]
            for name, tensor in tensors.items()
        }
    )


def test_an_offer_in_one_bucket_is_of_the_bytes_that_are_sent(tmp_path: Path) -> None:
    model = dense()
    sender = sender_of(model, tmp_path)
    for version in (4, 5):
        offered = sender.offer(version)
        bucket = sender.pack(version, 0)
        tensors = dict(model.named_parameters())
        assert (offered.version, offered.num_buckets) == (version, 1)
        assert offered.digest == digest_of(tensors)
        assert sender.flat(version, 0).numpy().tobytes() == data_of(list(tensors.values()))
        assert [each.name for each in bucket.tensors] == list(tensors)
        assert offered.num_bytes == bucket.num_bytes == 2 * model.num_parameters()
        for tensor in model.parameters():
            tensor.data.mul_(-0.75)
    sender.drop()


def test_many_buckets_say_what_one_says(tmp_path: Path) -> None:
    model = dense()
    one, many = sender_of(model, tmp_path), sender_of(model, tmp_path / "many", 2_000)
    offered = many.offer(1)
    assert offered.num_buckets > 3
    assert offered.digest == one.offer(1).digest == many.describe(1, tmp_path).digest
    sent = b""
    for index in range(offered.num_buckets):
        many.pack(1, index)
        sent += many.flat(1, index).numpy().tobytes()
    assert sent == one.flat(1, 0).numpy().tobytes()
    for sender in (one, many):
        sender.drop()
    assert not (tmp_path / "m").exists()


def test_what_was_offered_in_one_bucket_is_packed(tmp_path: Path) -> None:
    sender = sender_of(dense(), tmp_path)
    sender.offer(1)
    with CountedOperations() as counted:
        bucket = sender.pack(1, 0)
    assert (counted.number, bucket.version) == (0, 1)
    sender.drop()


def test_experts_go_by_the_names_of_files(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    sender = sender_of(model, tmp_path)
    sender.offer(1)
    bucket = sender.pack(1, 0)
    own = dict(model.named_parameters())
    fused = own["model.layers.1.mlp.experts.gate_up_proj"]  # [4, 2 x 8, 16]
    flat, end = sender.flat(1, 0), 0
    sent = {}
    for name, _, shape in bucket.tensors:
        begin, end = end, end + 2 * torch.Size(shape).numel()
        sent[name] = flat[begin:end].view(torch.bfloat16).view(shape)
    assert end == len(flat)
    prefix = "model.layers.1.mlp.experts.2"
    assert torch.equal(sent[f"{prefix}.gate_proj.weight"], fused[2, :8].bfloat16())
    assert torch.equal(sent[f"{prefix}.up_proj.weight"], fused[2, 8:].bfloat16())
    sender.drop()


def test_an_offer_asks_for_no_operation_of_a_single_tensor(tmp_path: Path) -> None:
    """One call copies all into the bucket, and fingerprints are of all tensors of a size."""
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**(SIZES | {"num_hidden_layers": 30})))
    sender = sender_of(model, tmp_path)
    sender.offer(1)  # makes the keys of fingerprints
    with CountedOperations() as counted:
        offered = sender.offer(2)
        sender.pack(2, 0)
    assert offered.num_tensors == 332
    sizes = {parameter.numel() for parameter in model.parameters()}
    assert counted.number <= 20 * len(sizes) < offered.num_tensors // 2
    sender.drop()


@pytest.mark.parametrize("prefix", ["", "inner."])
def test_weights_are_parameters_once_and_buffers_that_are_stored(prefix: str) -> None:
    model: torch.nn.Module = torch.nn.Module()
    model.first, model.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    model.second.weight = model.first.weight
    model.register_buffer("stored", torch.ones(1))
    model.register_buffer("again", model.stored)
    model.register_buffer("made", torch.ones(1), persistent=False)
    model.register_buffer("absent", None)
    whole = model
    if prefix:
        whole = torch.nn.Module()
        whole.inner = model
        whole.inner_too = model
    found = named_weights(whole)
    assert list(found) == [prefix + name for name in ("first.weight", "first.bias", "stored")]
    assert found[f"{prefix}stored"] is model.stored
    assert found[f"{prefix}first.weight"] is model.second.weight
