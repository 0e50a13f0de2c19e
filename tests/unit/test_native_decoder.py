"""The native decoder against transformers: same weights, same tokens, float32."""

import time
from pathlib import Path

import pytest
import torch
import transformers
import xxhash
from safetensors.torch import load_file

from workers.engines.native.core import Core
from workers.engines.native.model_shape import FAMILIES, read_model_shape
from workers.engines.native.options import parse_options
from workers.engines.native.request import Event, Finished, Request, Sampling
from workers.engines.native.text import TextCodec

VOCABULARY = 320
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.15,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3_rope": lambda: transformers.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=24,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3_moe_raw_weights": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=24,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        decoder_sparse_step=2,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3),
    "olmoe_clipped": lambda: transformers.OlmoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, clip_qkv=0.8
    ),
}
MIXTURES = ("qwen3_moe", "qwen3_moe_raw_weights", "olmoe", "olmoe_clipped")


def save_model(name: str, folder: Path, seed: int = 0) -> torch.nn.Module:
    """A random model of one family, saved as an HF folder and returned."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Norms at 1 and biases at 0 would hide a missing one.
                parameter.add_(torch.randn_like(parameter) * 0.2)
            assert parameter_name
    model.save_pretrained(folder)
    return model


def make_core(folder: Path, *extra: str) -> tuple[Core, dict[str, tuple[Request, Event]]]:
    """An engine core on ``folder`` and the events that it reports, by request id."""
    arguments = ["--model-path", str(folder), "--dtype", "float32", "--context-length", "64"]
    options = parse_options([*arguments, "--enable-return-routed-experts", *extra])
    events: dict[str, tuple[Request, Event]] = {}

    def emit(request: Request, event: Event) -> None:
        events[request.rid] = (request, event)

    core = Core(options, read_model_shape(folder), 64, TextCodec(folder), emit)
    return core, events


def make_request(rid: str, prompt: list[int], score: bool = False, **told: object) -> Request:
    values = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_new_tokens": 10,
        "min_new_tokens": 0,
        "stop_token_ids": (),
        "stop_strings": (),
        "seed": 7,
    } | told
    return Request(
        rid=rid,
        input_ids=prompt,
        sampling=Sampling(**values),  # type: ignore[arg-type]
        prompt_logprobs_from=0 if score else None,
        want_experts=True,
        stream=False,
        arrived=time.monotonic(),
    )


def run_to_end(core: Core) -> None:
    with torch.inference_mode():
        while core.scheduler.turn():
            pass


def reference_logprobs(
    model: torch.nn.Module, prompt: list[int], output: list[int], temperature: float
) -> torch.Tensor:
    """log softmax(logits / temperature) of ``output`` after ``prompt`` by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    scores = (logits.double() / temperature).log_softmax(-1)
    return scores.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", [(), ("--deterministic", "--max-running-requests", "8")])
def test_greedy_tokens_and_logprobs_equal_transformers(
    name: str, mode: tuple[str, ...], tmp_path: Path
) -> None:
    model = save_model(name, tmp_path)
    core, events = make_core(tmp_path, *mode)
    generator = torch.Generator().manual_seed(1)
    prompts = {
        f"r{length}": torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        for length in (1, 2, 7, 8, 33)
    }
    for number, (rid, prompt) in enumerate(prompts.items()):
        temperature = (0.0, 0.7)[number % 2]
        core.scheduler.add(make_request(rid, prompt, temperature=temperature, score=number > 2))
    run_to_end(core)
    assert events.keys() == prompts.keys()
    for request, event in events.values():
        assert isinstance(event, Finished)
        heat = request.sampling.temperature or 1.0
        expected = reference_logprobs(model, request.input_ids, event.output_ids, heat)
        got = torch.tensor(event.logprobs, dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        if request.sampling.temperature == 0:
            ids = torch.tensor([request.input_ids + event.output_ids])
            best = model(ids).logits[0, len(request.input_ids) - 1 : -1].argmax(-1)
            assert event.output_ids == best.tolist()


def test_prompt_scores_equal_transformers(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path)
    core, events = make_core(tmp_path)
    prompt = [5, 200, 17, 31, 4, 4, 90]
    core.scheduler.add(make_request("r", prompt, score=True, max_new_tokens=0))
    run_to_end(core)
    request, event = events["r"]
    assert isinstance(event, Finished)
    assert event.output_ids == []
    assert event.finish_reason == {"type": "length", "length": 0}
    assert request.input_logprobs is not None
    assert [token for _, token in request.input_logprobs] == prompt
    assert request.input_logprobs[0][0] is None
    expected = reference_logprobs(model, prompt[:1], prompt[1:], 1.0)
    got = torch.tensor([value for value, _ in request.input_logprobs[1:]], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_new_weights_in_place_and_one_request_at_a_time(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "a", seed=0)
    model = save_model(name, tmp_path / "b", seed=1)
    core, events = make_core(tmp_path / "a", "--max-running-requests", "1")
    before = core.checksums()
    assert core.update(tmp_path / "b", "1", flush_cache=True).success
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert core.checksums().keys() == before.keys() == written.keys()
    digests = {n: xxhash.xxh3_64_hexdigest(t.numpy().tobytes()) for n, t in written.items()}
    assert core.checksums() == digests
    for rid, prompt in (("r1", [5]), ("r2", [9, 8, 7, 6, 5, 4])):
        core.scheduler.add(make_request(rid, prompt))
    run_to_end(core)
    for request, event in events.values():
        assert isinstance(event, Finished)
        expected = reference_logprobs(model, request.input_ids, event.output_ids, 1.0)
        got = torch.tensor(event.logprobs, dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_routed_experts_equal_transformers_router(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    core, events = make_core(tmp_path)
    core.scheduler.add(make_request("r", [9, 8, 7, 6], max_new_tokens=5))
    run_to_end(core)
    request, event = events["r"]
    assert isinstance(event, Finished)
    assert event.experts is not None
    fed = request.input_ids + event.output_ids[:-1]
    with torch.no_grad():
        logits = model(torch.tensor([fed]), output_router_logits=True).router_logits
    top_k = model.config.num_experts_per_tok
    got = torch.frombuffer(bytearray(event.experts), dtype=torch.int32)
    got = got.view(len(fed), len(logits), top_k)
    for layer, scores in enumerate(logits):
        expected = scores.topk(top_k, dim=-1).indices.sort(-1).values
        assert torch.equal(got[:, layer].sort(-1).values, expected.int())


def test_every_family_is_checked() -> None:
    assert {CONFIGS[name]().model_type for name in CONFIGS} == set(FAMILIES)
