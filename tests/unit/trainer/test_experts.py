"""Mixtures of experts: names of files, digests, engines and checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from activities.storage.store import Store
from activities.wire.digest import weights_digest
from models.checkpoint import PolicyClock
from models.errors import ConfigurationError
from workers.engines.native.model_shape import read_model_shape
from workers.engines.native.weights import WeightStore
from workers.sources.characters import character_tokenizer
from workers.sources.expert_names import FUSED_FAMILIES, file_weights
from workers.sources.model import prepare_model
from workers.trainers import reference
from workers.trainers.export import ExportProbe
from workers.trainers.local import LocalTrainer

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, norm_topk_prob=False, clip_qkv=1.5),
}


def new_model(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).float().eval()


@pytest.fixture(params=FUSED_FAMILIES)
def experts_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of a random mixture with the character tokenizer, written by transformers."""
    folder = tmp_path / "experts"
    new_model(request.param).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_file_names_and_bytes_are_those_that_transformers_writes(family, tmp_path):
    model = new_model(family)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    own = file_weights(dict(model.named_parameters()), family)
    assert own.keys() == written.keys()
    assert "model.layers.0.mlp.experts.4.down_proj.weight" in own
    assert all(torch.equal(own[name], tensor) for name, tensor in written.items())


def test_other_families_keep_their_names(make_model):
    own = dict(make_model("qwen3").named_parameters())
    assert file_weights(own, "qwen3") == own


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_prove_an_export_by_its_digest(
    make_spec, make_groups, experts_dir, tmp_path, dtype
):
    trainer = LocalTrainer(make_spec(inference={"dtype": dtype}), experts_dir)
    before = trainer.export_weights(0, tmp_path / "v0")
    trainer.optimize(0, "a", make_groups())
    after = trainer.export_weights(1, tmp_path / "v1")
    assert before.digest != after.digest
    store = WeightStore(read_model_shape(experts_dir), getattr(torch, dtype))
    store.load(tmp_path / "v0")
    assert weights_digest(store.checksums()) == before.digest
    store.load(tmp_path / "v1")
    assert weights_digest(store.checksums()) == after.digest
    assert len(store.checksums()) == after.num_tensors
    assert trainer.copy.num_bytes == store.num_bytes()


def test_transformers_loads_an_export(make_spec, make_groups, experts_dir, tmp_path):
    trainer = LocalTrainer(make_spec(), experts_dir)
    trainer.optimize(0, "a", make_groups())
    trainer.export_weights(1, tmp_path / "v1")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "v1", dtype=torch.float32)
    loaded, own = dict(model.named_parameters()), dict(trainer.model.named_parameters())
    assert loaded.keys() == own.keys()
    assert all(torch.equal(loaded[name], own[name]) for name in own)


def test_the_final_export_is_proved(make_spec, make_groups, experts_dir, tmp_path):
    trainer = LocalTrainer(make_spec(), experts_dir)
    trainer.optimize(0, "a", make_groups())
    report = trainer.export_hf(tmp_path / "hf", ExportProbe((1, 20, 30), "q", 3), "hf")
    assert report.max_abs_logit_difference <= 1e-5
    assert "model.layers.2.mlp.experts.0.up_proj.weight" in load_file(
        tmp_path / "hf" / "model.safetensors"
    )


def test_two_updates_equal_one_a_restart_and_one(make_spec, make_groups, experts_dir, tmp_path):
    spec = make_spec(training={"global_batch_size": 4})
    whole = LocalTrainer(spec, experts_dir)
    first = LocalTrainer(spec, experts_dir)
    for trainer in (whole, first):
        trainer.optimize(0, "a", make_groups(0))
    first.save(tmp_path / "checkpoint")
    second = LocalTrainer(spec, experts_dir)
    second.load(
        tmp_path / "checkpoint", PolicyClock(completed_steps=2, published_step=0, next_rollout_id=1)
    )
    expected = whole.optimize(1, "b", make_groups(1))
    resumed = second.optimize(1, "b", make_groups(1))
    assert resumed.metrics["train/loss"] == expected.metrics["train/loss"]
    left, right = dict(whole.model.named_parameters()), dict(second.model.named_parameters())
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_every_expert_that_was_used_learns(make_spec, make_groups, experts_dir):
    trainer = LocalTrainer(make_spec(), experts_dir)
    before = file_weights(
        {n: p.detach().clone() for n, p in trainer.model.named_parameters()},
        trainer.model.config.model_type,
    )
    trainer.optimize(0, "a", make_groups(num_groups=2))
    after = file_weights(dict(trainer.model.named_parameters()), trainer.model.config.model_type)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert not any(".mlp.gate." in name for name in still)
    assert sum(".experts." in name for name in still) < sum(".experts." in n for n in before) / 4


def test_the_loop_over_experts_computes_on_cpu(make_spec, experts_dir):
    model = LocalTrainer(make_spec(), experts_dir).model
    assert model.config._experts_implementation == "eager"


def test_fused_experts_in_the_files_are_fine(make_spec, tmp_path):
    model = new_model("olmoe")
    model.save_pretrained(tmp_path / "fused")
    save_file(dict(model.named_parameters()), tmp_path / "fused" / "model.safetensors")
    trainer = LocalTrainer(make_spec(), tmp_path / "fused")
    ref = trainer.export_weights(0, tmp_path / "v0")
    store = WeightStore(read_model_shape(tmp_path / "fused"), torch.float32)
    store.load(tmp_path / "fused")
    assert weights_digest(store.checksums()) == ref.digest


def test_merged_tensors_of_an_unknown_family_are_refused(make_spec, tmp_path):
    sizes = {k: v for k, v in SIZES.items() if k != "num_experts"} | {"num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "mixtral")
    with pytest.raises(ConfigurationError, match=r"MixtralForCausalLM holds .* by other names"):
        LocalTrainer(make_spec(), tmp_path / "mixtral")


def test_a_tied_qwen3_moe_is_refused_before_work(make_spec, tmp_path):
    new_model("qwen3_moe").save_pretrained(tmp_path / "tied")
    character_tokenizer().save_pretrained(tmp_path / "tied")
    config = json.loads((tmp_path / "tied" / "config.json").read_text())
    store = Store(tmp_path / "root")
    spec = make_spec(model={"source": str(tmp_path / "tied")})
    text = json.dumps(config | {"tie_word_embeddings": True})
    (tmp_path / "tied" / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"tie_word_embeddings = true.*lm_head\.weight"):
        prepare_model(spec, store)
    assert not (tmp_path / "root" / "prepared").exists()
    shutil.rmtree(tmp_path / "tied")
    new_model("qwen3_moe").save_pretrained(tmp_path / "tied")
    character_tokenizer().save_pretrained(tmp_path / "tied")
    assert prepare_model(spec, store).model_type == "qwen3_moe"


@pytest.mark.parametrize(("device", "experts"), [("cpu", "eager"), ("cuda", "grouped_mm")])
def test_the_reference_computes_experts_as_the_policy_does(
    make_spec, tmp_path, monkeypatch, device, experts
):
    """At version 0 both must score alike, to the last bit."""
    asked = {}

    def look(folder, **options):
        asked.update(options)
        raise ConfigurationError("enough")

    monkeypatch.setattr(reference, "load_model", look)
    spec = make_spec(training={"kl_loss_coef": 0.1})
    with pytest.raises(ConfigurationError, match="enough"):
        reference.load_reference(spec, tmp_path, torch.device(device))
    assert asked == {"attention": "sdpa", "experts": experts}


def test_gradient_norms_by_kind_of_parameter_make_up_the_whole(make_spec, make_groups, experts_dir):
    spec = make_spec(core={"max_policy_lag": 8, "diagnostic_interval": 1})
    metrics = LocalTrainer(spec, experts_dir).optimize(0, "a", make_groups()).metrics
    kinds = ("dense", "expert", "router")
    norms = [metrics[f"train/rank0_local_pre_optimizer/{kind}/l2"] for kind in kinds]
    assert min(norms) > 0
    assert sum(x * x for x in norms) ** 0.5 == pytest.approx(metrics["train/grad_norm"], rel=1e-5)
