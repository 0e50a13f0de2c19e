"""Buckets of a plain model in SGLang: copied at once to where SGLang was seen to put them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.counted_operations import CountedOperations
from workers.engines.sglang.direct_load import DirectLoad
from workers.engines.sglang.live_weights import parameters_of

LAYERS, HIDDEN, INNER, VOCABULARY, PADDED = 20, 8, 12, 10, 16
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
QUERY, KEY = 8, 4
"""Rows of queries (2 heads of 4) and of keys."""


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, torch.nan, dtype=torch.bfloat16), requires_grad=False)


def holder(weight: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = weight
    return module


class Qwen3ForCausalLM(nn.Module):
    """Parameters as SGLang keeps them; the head is the embedding. Loads tensor by tensor."""

    swapped = False
    """Keys lie after values."""
    model: Any

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0
        self.model = nn.Module()
        self.model.embed_tokens = holder(parameter(PADDED, HIDDEN))
        self.model.layers = nn.ModuleList()
        for _ in range(LAYERS):
            layer = nn.Module()
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            layer.self_attn.qkv_proj = holder(parameter(QUERY + 2 * KEY, HIDDEN))
            layer.self_attn.o_proj = holder(parameter(HIDDEN, QUERY))
            layer.mlp.gate_up_proj = holder(parameter(2 * INNER, HIDDEN))
            layer.mlp.down_proj = holder(parameter(HIDDEN, INNER))
            layer.input_layernorm = holder(parameter(HIDDEN))
            self.model.layers.append(layer)
        self.lm_head = self.model.embed_tokens

    def load_weights(self, weights: Any) -> None:
        self.loads += 1
        for name, tensor in weights:
            place = self.place(name)
            place.copy_(tensor.view_as(place))
        self.model.embed_tokens.weight[VOCABULARY:] = 0

    def place(self, name: str) -> Tensor:
        """By the rules of the architecture, written down once more."""
        parameters = dict(self.named_parameters())
        *_, module, _ = name.split(".")
        if module == "embed_tokens":
            return parameters[name][:VOCABULARY]
        rows = {"q_proj": (0, 8), "k_proj": (8, 12), "v_proj": (12, 16)}
        if self.swapped:
            rows |= {"k_proj": (12, 16), "v_proj": (8, 12)}
        if module in rows:
            begin, end = rows[module]
            return parameters[name.replace(module, "qkv_proj")][begin:end]
        if module in ("gate_proj", "up_proj"):
            begin = INNER * (module == "up_proj")
            return parameters[name.replace(module, "gate_up_proj")][begin : begin + INNER]
        return parameters[name]


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Not a plain one by its name."""


SHAPES = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)} | {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(LAYERS)
    for name, shape in {
        "self_attn.q_proj": (QUERY, HIDDEN), "self_attn.k_proj": (KEY, HIDDEN),
        "self_attn.v_proj": (KEY, HIDDEN), "self_attn.o_proj": (HIDDEN, QUERY),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,),
    }.items()
}  # fmt: skip


def bucket_of(seed: int, names: tuple[str, ...] = tuple(SHAPES)) -> tuple[Tensor, list[Any]]:
    """Random weights and their records, as a trainer hands them over."""
    generator = torch.Generator().manual_seed(seed)
    parts, records, end = [], [], 0
    for name in names:
        data = torch.randn(SHAPES[name], generator=generator).bfloat16()
        parts.append(data.view(-1).view(torch.uint8))
        begin, end = end, end + len(parts[-1])
        records.append(
            SimpleNamespace(
                name=name, shape=data.shape, dtype=data.dtype,
                start_idx=begin, end_idx=end, numel=end - begin,
            )
        )  # fmt: skip
    return torch.cat(parts), records


def assert_holds(model: Qwen3ForCausalLM, bucket: tuple[Tensor, list[Any]]) -> None:
    flat, records = bucket
    for each in records:
        sent = flat[each.start_idx : each.end_idx].view(each.dtype).view(each.shape)
        assert torch.equal(model.place(each.name), sent), each.name
    assert not model.model.embed_tokens.weight[VOCABULARY:].any()


def test_the_first_bucket_is_loaded_by_the_model_and_the_others_at_once() -> None:
    model, direct = Qwen3ForCausalLM(), DirectLoad(CONFIG, 1)
    for seed in range(3):
        bucket = bucket_of(seed)
        direct.load(model, *bucket)
        assert_holds(model, bucket)
        model.model.embed_tokens.weight[VOCABULARY:] = torch.nan  # as memory taken back has it
    assert model.loads == 1
    other = Qwen3ForCausalLM()
    direct.load(other, *bucket_of(4))
    assert_holds(other, bucket_of(4))
    assert other.loads == 1


def test_a_load_at_once_is_two_operations() -> None:
    model, direct = Qwen3ForCausalLM(), DirectLoad(CONFIG, 1)
    direct.load(model, *bucket_of(1))
    with CountedOperations() as counted:
        direct.load(model, *bucket_of(2))
    made = CountedOperations()
    with made:
        bucket_of(2)
    assert counted.number - made.number == 2  # all copies, and zeros for the padding


def test_parameters_that_move_are_looked_for_and_proved_again() -> None:
    model, direct = Qwen3ForCausalLM(), DirectLoad(CONFIG, 1)
    for seed in range(2):
        direct.load(model, *bucket_of(seed))
    assert model.loads == 1
    for weight in model.parameters():
        weight.data = torch.full_like(weight, torch.nan)
    for seed in range(2, 4):
        direct.load(model, *bucket_of(seed))
        assert_holds(model, bucket_of(seed))
    assert model.loads == 2


def test_a_place_with_gaps_is_filled_as_well() -> None:
    """Padding of inner columns, as of a feed-forward whose width SGLang rounds up."""
    model, direct = Qwen3ForCausalLM(), DirectLoad(CONFIG, 1)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight = parameter(HIDDEN, INNER + 4)
    place = model.place
    model.place = lambda name: place(name)[:, :INNER] if "down_proj" in name else place(name)
    for seed in range(2):
        direct.load(model, *bucket_of(seed))
        assert_holds(model, bucket_of(seed))
    assert model.loads == 1
    assert not any(layer.mlp.down_proj.weight[:, INNER:].any() for layer in model.model.layers)


def test_a_model_that_keeps_them_elsewhere_loads_every_bucket_itself() -> None:
    model, direct = Qwen3ForCausalLM(), DirectLoad(CONFIG, 1)
    model.swapped = True
    for seed in range(3):
        direct.load(model, *bucket_of(seed))
        assert_holds(model, bucket_of(seed))
    assert model.loads == 3


@pytest.mark.parametrize("reason", ["processes", "class", "part", "shape", "dtype"])
def test_what_is_not_plain_is_loaded_by_the_model(reason: str) -> None:
    model = Qwen3MoeForCausalLM() if reason == "class" else Qwen3ForCausalLM()
    direct = DirectLoad(CONFIG, 2 if reason == "processes" else 1)
    direct.load(model, *bucket_of(0))
    flat, records = bucket_of(1, tuple(SHAPES)[1:] if reason == "part" else tuple(SHAPES))
    if reason == "shape":  # a norm as a matrix: the model's code may know what to do with it
        records[-1].shape = torch.Size((1, HIDDEN))
    if reason == "dtype":
        records[-1].dtype = torch.float16
    direct.load(model, flat, records)
    assert model.loads == 2


def test_parameters_are_those_that_torch_names() -> None:
    model = Qwen3ForCausalLM()
    for _ in range(2):
        named = dict(model.named_parameters())
        assert [name for name, _ in parameters_of(model)] == list(named)
        assert all(tensor is named[name] for name, tensor in parameters_of(model))
        model.model.layers[3].mlp.down_proj.weight = parameter(HIDDEN, INNER)  # after a load
