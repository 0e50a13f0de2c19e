import ast
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import jsonschema
import pytest
from pydantic_core import PydanticUndefined

from configs.hints import leaf_keys, section_at
from configs.load import load_run
from configs.overrides import apply_overrides
from configs.plan import build_plan
from configs.problem import shown
from configs.render import CONTROL_QUEUE, WORKFLOW_TYPE, run_request, start_words
from configs.schema import json_schema
from models.checkpoint import RewindRequest
from models.run import RunRequest
from workflows import options

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.toml"))
SECTION_FILES = frozenset(
    (
        *("asynchronous", "core", "data", "evaluation", "inference", "launch", "model"),
        *("placement", "section", "trainer", "training"),
    )
)
FIXED = frozenset(
    (
        "schema_version",
        "model.format",
        "trainer.backend",
    )
)
"""Keys with one legal value: they exist so that a later choice is no change of schema."""
CHANGES: dict[str, Any] = {
    "name": "other",
    "model.source": "org/name",
    "model.tiny.head_dim": 64,
    "data.tasks": [{"task": "reverse_word", "train_count": 1, "eval_count": 1}],
    "data.prompt_data": "/x.jsonl",
    "data.eval_prompt_data": "/y.jsonl",
    "data.verifier": "number",
    "data.tasks.task": "gym:gcd",
    "data.tasks.verifier": "number",
    "data.tasks.params": {"letters": 9},
    "output.root": "/other",
    "output.hf_dir": "hf",
    "training.use_tis": True,
    "trainer.packing": "documents",
    "trainer.logprob_chunk_tokens": 64,
    "launch.fleet": "other",
    "launch.env": {"A": "1"},
    "inference.top_k": 5,
    "inference.sglang": {"mem_fraction_static": 0.5},
    "training.dppo_divergence_type": "kl",
    "optimizer.min_lr": 1e-5,
    "optimizer.lr_warmup_init": 1e-5,
    "optimizer.lr_decay_steps": 150,
    "optimizer.lr_wsd_decay_steps": 20,
    "model.tiny.hidden_size": 64,
    "model.tiny.num_heads": 2,
    "model.tiny.num_kv_heads": 1,
    "model.tiny.num_experts": 4,
    "core.max_policy_lag": 2,
    "inference.router_max_queued_requests": 5000,
    "async.async_max_concurrent_samples": 64,
    "training.rollout_batch_size": 16,
    "training.samples_per_prompt": 4,
    "training.global_batch_size": 256,
    "inference.server_concurrency": 17,
    "core.max_context_length": 99,
}


ASYNC_ONLY = frozenset(
    (
        "core.publication_mode",
        "core.pipeline_observation_interval_s",
        "inference.router_max_queued_requests",
    )
)
"""Refused where the run is not fully async."""
BACKGROUND_ONLY = frozenset(
    ("evaluation.submit_timeout_s", "evaluation.timeout_s", "evaluation.num_threads")
)
"""Refused where evaluations share the run's engines."""

GPU_ONLY = frozenset(
    (
        *("inference.sglang", "inference.tensor_parallel_size"),
        *("placement.gpus_per_node", "placement.gpu_memory_gib", "trainer.compile"),
    )
)
"""Refused where the run takes no GPU."""

EXPERTS_ONLY = frozenset(
    (
        *("model.tiny.num_experts", "model.tiny.experts_per_token"),
        *("model.tiny.moe_intermediate_size", "training.use_rollout_routing_replay"),
        *("training.router_aux_loss_weight", "training.router_z_loss_weight"),
        "core.replay_diagnostics",
    )
)
"""Refused with a dense architecture."""


def test_the_committed_schema_is_current() -> None:
    committed = json.loads((ROOT / "configs" / "run.schema.json").read_text())
    assert committed == json_schema(), "run `poe schema`"


def test_the_schema_is_valid_draft_2020_12_and_every_key_is_described() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    sections = {"Properties": schema["properties"]} | {
        name: definition["properties"] for name, definition in schema["$defs"].items()
    }
    bare = [
        f"{name}.{key}"
        for name, properties in sections.items()
        for key, value in properties.items()
        if not value.get("description") and "$ref" not in value
    ]
    assert not bare


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_match_the_schema_and_name_it(recipe: Path) -> None:
    first, *_ = recipe.read_text().splitlines()
    assert first == "#:schema ../run.schema.json"
    assert (recipe.parent / "../run.schema.json").is_file()
    jsonschema.validate(tomllib.loads(recipe.read_text()), json_schema())
    loaded = load_run(recipe)
    assert loaded.spec.name == recipe.stem
    jsonschema.validate(loaded.document, json_schema())
    assert build_plan(loaded)["warnings"] == []


def test_the_schema_refuses_what_loading_refuses() -> None:
    document = tomllib.loads(RECIPES[0].read_text())
    document["training"]["num_rollout"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, json_schema())


@pytest.mark.parametrize("key", sorted(set(leaf_keys()) - FIXED))
def test_every_key_changes_the_plan(key: str, tmp_path: Path) -> None:
    base = {**tomllib.loads((ROOT / "configs/recipes/tiny.toml").read_text()), "name": "a"}
    if key in ("data.prompt_data", "data.eval_prompt_data", "data.verifier"):
        base["data"] = {"prompt_data": "/a.jsonl"}
        base["model"] = {"source": "org/base"}
        base["evaluation"] = {}
    elif key == "model.source":
        base["model"] = {"source": "org/base"}
    if key in GPU_ONLY:
        base["inference"]["engine"] = "sglang"
        base["placement"] = {"mode": "disaggregated"}
        base["trainer"] = {**base.get("trainer", {}), "compute_dtype": "bfloat16"}
    if key in EXPERTS_ONLY:
        base["model"]["tiny"]["architecture"] = "qwen3_moe"
        if key == "core.replay_diagnostics":
            base["training"]["use_rollout_routing_replay"] = True
    if key == "optimizer.lr_decay_steps":
        base["optimizer"]["lr_schedule"] = "cosine"
    elif key == "optimizer.lr_wsd_decay_steps":
        base["optimizer"] |= {"lr_schedule": "WSD", "lr_wsd_decay_steps": 10}
    if key == "training.save_checkpoints":
        del base["training"]["save_interval"]
    if key.startswith("async.") or key in ASYNC_ONLY:
        del base["training"]["global_batch_size"]
        base["core"]["max_policy_lag"] = 1
        base["async"] = {"fully_async": key != "async.fully_async"}
    elif key in BACKGROUND_ONLY:
        base["evaluation"]["mode"] = "background"
    changed = _changed(base, key, CHANGES[key] if key in CHANGES else _other_value(key, base))
    assert _plan(tmp_path, changed) != _plan(tmp_path, base)


def test_every_key_is_read_somewhere() -> None:
    """Outside the schema itself: an attribute of that name is used in code that runs."""
    used = set(_attributes())
    assert not {key for key in set(leaf_keys()) - FIXED if key.split(".")[-1] not in used}


def test_the_rendered_input_is_the_workflow_input() -> None:
    loaded = load_run(RECIPES[0])
    request = RunRequest.model_validate_json(json.dumps(run_request(loaded)))
    assert request.config == loaded.document
    assert request.config_sha256 == loaded.sha256
    assert CONTROL_QUEUE == options.CONTROL_QUEUE
    assert " ".join(start_words("train/a", "run.json")) == (
        f"workflow start --type {WORKFLOW_TYPE} --task-queue {CONTROL_QUEUE} "
        "--workflow-id train/a --id-conflict-policy Fail --input-file run.json"
    )
    limited = start_words("train/a", "run.json", 5400.0)
    assert limited[-2:] == ("--execution-timeout", "5400.000000s")
    assert run_request(loaded, RewindRequest(updates=4))["rewind"] == {"updates": 4, "reason": ""}


def _plan(folder: Path, document: dict[str, Any]) -> dict[str, Any]:
    path = folder / "run.json"
    path.write_text(json.dumps(document))
    plan = build_plan(load_run(path))
    del plan["spec_sha256"], plan["identity_sha256"]
    return plan


def _changed(document: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    if key.startswith("data.tasks."):
        task = {**document["data"]["tasks"][0], key.removeprefix("data.tasks."): value}
        return {**document, "data": {"tasks": [task]}}
    table, _, name = key.rpartition(".")
    nested = apply_overrides(document, [f"{table}.probe=1"] if table else [])
    target = nested
    for part in table.split(".") if table else []:
        target = target[part]
    target.pop("probe", None)
    target[name] = value
    return nested


def _field(key: str) -> Any:
    *table, name = key.split(".")
    section = section_at(table)
    assert section is not None
    return section.model_fields[name]


def _other_value(key: str, document: dict[str, Any]) -> Any:
    """A legal value of the key that is not the present one."""
    field = _field(key)
    present: Any = document
    for part in key.split("."):
        if isinstance(present, list):
            present = present[0]
        present = present.get(part, PydanticUndefined)
        if present is PydanticUndefined:
            present = field.default
            break
    kind = next(arg for arg in (*get_args(field.annotation), field.annotation) if arg)
    if get_origin(field.annotation) is Literal:
        return next(choice for choice in get_args(field.annotation) if choice != present)
    if kind is bool:
        return not present
    if kind is int:
        return 1 if present is None else present + 1
    if kind is float:
        return 1.5 if present is None else present / 2 + 0.01
    assert kind is str, key
    return "other"


def _attributes() -> Iterator[str]:
    for package in ("configs", "activities", "workflows", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            if package == "configs" and path.stem in SECTION_FILES:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    yield node.attr


def test_values_are_shown_short_and_tables_closed() -> None:
    assert shown("x" * 300).endswith("...")
    assert shown({"secret": "s"}) == "{...}"
    assert shown([{"secret": "s"}]) == "[...]"
