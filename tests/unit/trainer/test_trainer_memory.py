"""What layers keep for the backward pass, counted while they compute, beside the estimate."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from configs.memory import ModelShape
from configs.trainer_memory import activation_bytes, trainer_bytes, trainer_memory
from workers.trainers import document_attention, norms
from workers.trainers.decoder_layers import compile_layers, recompute_layers
from workers.trainers.device_memory import PeakMemory, expected_memory, leaves_room
from workers.trainers.document_attention import use_document_attention
from workers.trainers.documents import Document, collate_documents
from workers.trainers.logprobs import Scorer
from workers.trainers.norms import fuse_norms

pytestmark = [  # what torch's compiler sets off by itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]
TOKENS = 640  # no width of the models below
WIDTHS = [(64, 4, 2, 16, 96), (128, 8, 4, 32, 160)]


@torch.library.custom_op("perdure_tests::attend", mutates_args=())
def keeps_inputs_and_output(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Stands for the kernel: it keeps what that keeps."""
    return query.clone(memory_format=torch.contiguous_format)


@keeps_inputs_and_output.register_fake
def _(query, key, value):
    return torch.empty_like(query, memory_format=torch.contiguous_format)


keeps_inputs_and_output.register_autograd(
    lambda ctx, gradient: tuple(
        saved + gradient.sum() + ctx.saved_tensors[3].sum() for saved in ctx.saved_tensors[:3]
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


@torch.library.custom_op("perdure_tests::rms_norm", mutates_args=())
def keeps_input(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Stands for the kernel of norms."""
    return hidden.clone()


keeps_input.register_fake(lambda hidden, weight: torch.empty_like(hidden))
keeps_input.register_autograd(
    lambda ctx, gradient: (gradient + ctx.saved_tensors[0], gradient.flatten(0, -2).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def config_of(widths, layers):
    hidden, heads, kv_heads, size, feed_forward = widths
    config = Qwen3Config(
        vocab_size=60,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
    )
    config._attn_implementation = "sdpa"
    return config


def kept_bytes(widths, layers, dtype, how, again):
    """Of a forward: storages of as many elements a token as they have, weights left out."""
    model = AutoModelForCausalLM.from_config(config_of(widths, layers), dtype=torch.float32).eval()
    use_document_attention(model)
    compiled = how == "compiled"
    if how == "on a GPU":
        fuse_norms(model)
    if compiled:
        torch._dynamo.reset()
        compile_layers(model, "aot_eager_decomp_partition")
    if again:
        recompute_layers(model)
    scorer = Scorer.of(model, 1.0, 64, dtype, longest_document=TOKENS if compiled else None)
    pack = collate_documents([Document([1] * 20, [2] * 300, i * 300) for i in range(2)])
    seen = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if any(size in (TOKENS, 2 * TOKENS) for size in tensor.shape):
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with scorer._autocast(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scorer._hidden(pack)
    return sum(size for size, _ in seen.values())


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(
    ("dtype", "how", "again"),
    [
        ("float32", "on a CPU", False),
        ("bfloat16", "on a CPU", False),
        ("bfloat16", "on a GPU", False),
        ("bfloat16", "compiled", False),
        ("bfloat16", "on a CPU", True),
        ("bfloat16", "on a GPU", True),
        ("bfloat16", "compiled", True),
    ],
)
def test_layers_keep_what_is_estimated(make_spec, monkeypatch, widths, dtype, how, again):
    torch_dtype = getattr(torch, dtype)
    monkeypatch.setattr(document_attention, "kernel_dtype", lambda query, value: torch_dtype)
    monkeypatch.setattr(
        document_attention,
        "attend",
        lambda query, key, value, bounds, scale, kernel: keeps_inputs_and_output(query, key, value),
    )
    if how == "on a GPU":
        kernel = lambda hidden, shape, weight, eps: keeps_input(hidden, weight)  # noqa: E731
        monkeypatch.setattr(norms, "_is_rms_norm", lambda module, eps: True)
        monkeypatch.setattr(norms.functional, "rms_norm", kernel)
    seen = [kept_bytes(widths, layers, torch_dtype, how, again) for layers in (2, 4)]
    trainer = {
        "compute_dtype": dtype,
        "compile": how == "compiled",
        "activation_checkpointing": again,
        "micro_batch_tokens": TOKENS,
    }
    hidden, heads, kv_heads, size, feed_forward = widths
    estimates = [
        activation_bytes(
            make_spec(trainer=trainer),
            ModelShape(0, 0, layers, kv_heads, size, 60, 0, hidden, heads, feed_forward),
            on_gpu=how == "on a GPU",
        )
        for layers in (2, 4)
    ]
    assert seen[1] - seen[0] == pytest.approx(estimates[1] - estimates[0], rel=0.03)


def test_what_a_process_holds_by_hand(make_spec):
    # 100 parameters a layer would do; states 16 bytes each and 2 for the bfloat16 copy
    spec = make_spec(
        trainer={
            "compute_dtype": "bfloat16",
            "micro_batch_tokens": 100,
            "num_processes": 2,
            "logprob_chunk_tokens": 50,
        }
    )
    shape = ModelShape(1000, 1000, 3, 2, 8, 500, 0, 32, 4, 64)
    held = trainer_memory(spec, shape, on_gpu=True)
    assert held.states == 18 * 1000
    layer = 12 * 32 + 8 * 32 + 8 * 16 + 8 * 64
    assert held.activations == 100 * (3 * layer + layer)
    assert held.logits == 50 * 500 * (2 + 12)
    assert held.of_process(2) == 9000 + held.activations + held.logits
    # of a large vocabulary a GPU computes some rows at a time, a CPU fewer
    big = make_spec(trainer={"compute_dtype": "bfloat16", "logprob_chunk_tokens": 8192})
    logits = 8192 * 150_000 * 2
    assert trainer_bytes(big, 0, 150_000, on_gpu=True)[1] == logits + (3 << 30)
    assert trainer_bytes(big, 0, 150_000)[1] == logits + (24 << 20)


def test_a_loaded_model_has_the_estimate_of_its_shape(make_spec, make_model, make_mixture):
    spec = make_spec()
    model = make_model("qwen3")
    parameters = sum(p.numel() for p in model.parameters())
    shape = ModelShape(parameters, parameters, 2, 2, 8, 100, 0, 32, 4, 64)
    assert expected_memory(spec, model) == trainer_memory(spec, shape, on_gpu=False)
    mixture = make_mixture("qwen3_moe")
    parameters = sum(p.numel() for p in mixture.parameters())
    shape = ModelShape(parameters, parameters, 3, 2, 8, 100, 0, 32, 4, 2 * 16)
    assert expected_memory(spec, mixture) == trainer_memory(spec, shape, on_gpu=False)


def test_without_a_gpu_no_peak_is_told(make_spec, make_model):
    memory = PeakMemory(make_spec(), make_model("qwen3"))
    memory.begin()
    assert memory.conclude(0, lambda event, values: pytest.fail("told")) == {}


@pytest.mark.parametrize(
    ("fraction", "free_gib", "room"),
    [
        (None, 75, True),  # an engine that starts anew takes half of what it finds
        (None, 74, False),
        (0.6, 75, True),
        (0.8, 89, False),  # 80 for its weights and cache, 10 for what else it computes with
        (0.8, 90, True),
    ],
)
def test_a_step_keeps_its_memory_where_engines_find_enough(make_spec, fraction, free_gib, room):
    spec = make_spec()
    if fraction is not None:
        section = spec.inference.model_copy(update={"sglang": {"mem_fraction_static": fraction}})
        spec = spec.model_copy(update={"inference": section})
    assert leaves_room(spec, free_gib << 30, 100 << 30) is room
