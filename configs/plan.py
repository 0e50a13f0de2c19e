"""What a run will do, worked out before anything starts."""

import re
from pathlib import PurePosixPath
from typing import Any

from configs.capacity_report import capacity_report
from configs.held_out import has_background_evaluation, has_held_out
from configs.load import Loaded
from configs.memory import ModelShape, estimate, model_shape
from configs.placement_memory import gpu_memory
from configs.plan_warnings import plan_warnings
from configs.run import RunSpec
from configs.scoring import scoring_plan
from configs.topology import topology
from models.run import LoopPlan

_EXPORT_MARGIN_S = 300.0
"""For the trainer's export and for replacing an engine, beside what engines take."""


def build_plan(loaded: Loaded) -> dict[str, Any]:
    """The whole plan as plain JSON: settings, stages, shape, allocation, memory, warnings."""
    spec, document = loaded.spec, loaded.document
    shape = model_shape(spec)
    return {
        "schema_version": 1,
        "name": spec.name,
        "run_id": spec.run_id,
        "config_path": loaded.path,
        "spec_sha256": loaded.sha256,
        "identity_sha256": loaded.identity,
        "model": document["model"],
        "data": document["data"],
        "output": document["output"],
        "launch": document["launch"],
        "evaluation": document["evaluation"],
        "tracking": document["tracking"],
        "runtime": {
            **{key: document[key] for key in ("training", "optimizer", "core", "async")},
            **{key: document[key] for key in ("trainer", "inference", "placement")},
            "shape": _shape(spec),
            "scoring_pass": _scoring_pass(spec),
            "async_capacity": capacity_report(spec),
        },
        "allocation": _allocation(spec, shape),
        "memory": estimate(spec, shape) if shape else None,
        "loop": loop_plan(spec).model_dump(mode="json"),
        "stages": _stages(spec),
        "warnings": [
            dict(zip(("code", "message"), pair, strict=True))
            for pair in plan_warnings(spec, loop_plan(spec))
        ],
        "runtime_validated": False,
    }


def loop_plan(spec: RunSpec, infra_timeout_multiplier: float = 1.0) -> LoopPlan:
    """The part of ``spec`` that decides the order of stages, defaults worked out."""
    held_out = has_held_out(spec)
    saves = spec.training.save_checkpoints
    return LoopPlan(
        num_rollouts=spec.training.num_rollouts,
        steps_per_update=spec.steps_per_update,
        max_policy_lag=spec.max_policy_lag,
        fully_async=spec.fully_async,
        save_checkpoints=saves,
        save_interval=(spec.training.save_interval or spec.training.num_rollouts)
        if saves
        else None,
        eval_interval=spec.evaluation.interval if held_out else None,
        eval_initial=spec.evaluation.initial and held_out,
        eval_final=spec.evaluation.final and held_out,
        eval_background=has_background_evaluation(spec),
        eval_submit_timeout_s=spec.evaluation.submit_timeout_s,
        publish_timeout_s=_rolling_timeout_s(spec),
        export_hf=spec.output.export_hf,
        max_run_seconds=spec.core.max_run_seconds,
        continue_as_new_updates=spec.core.continue_as_new_updates,
        max_recoveries=spec.launch.max_recoveries,
        heartbeat_timeout_s=spec.launch.heartbeat_timeout_s,
        infra_timeout_multiplier=infra_timeout_multiplier,
        model_name=model_name(spec),
        recipe_name=spec.name,
        tracking=_tracking(spec),
    )


def _tracking(spec: RunSpec) -> str:
    """Where to look for the run's curves in W&B, for people."""
    tracking = spec.tracking
    if tracking.wandb_mode == "offline":
        return f"{spec.output.root}/wandb"
    if tracking.wandb_mode == "disabled":
        return ""
    return "/".join(filter(None, (tracking.wandb_entity, tracking.wandb_project)))


def _rolling_timeout_s(spec: RunSpec) -> float | None:
    """Engines drain and load one after the other, each within its own deadlines."""
    inference = spec.inference
    if not spec.fully_async or spec.core.publication_mode != "rolling":
        return None
    one_engine_s = inference.drain_timeout_s + inference.update_timeout_s
    return _EXPORT_MARGIN_S + inference.num_engines * one_engine_s


def model_name(spec: RunSpec) -> str:
    """A short name of the model for people: the last part of its source."""
    return PurePosixPath(re.sub(r"^\w+:(//)?", "", spec.model.source)).name


def _stages(spec: RunSpec) -> list[str]:
    loop = loop_plan(spec)
    stages = ["claim", "prepare_model", "prepare_data", "start_fleet", "publish"]
    stages += ["evaluate_initial"] if loop.eval_initial else []
    stages += ["train"]
    stages += ["checkpoint"] if loop.save_checkpoints else []
    stages += ["evaluate_final"] if loop.eval_final else []
    return stages + (["export_hf"] if loop.export_hf else [])


def _shape(spec: RunSpec) -> dict[str, Any]:
    steps = spec.steps_per_update
    return {
        "updates": spec.training.num_rollouts,
        "samples_per_collection": spec.samples_per_collection,
        "samples_per_optimizer_step": spec.samples_per_collection // steps,
        "optimizer_steps_per_collection": steps,
        "optimizer_steps": steps * spec.training.num_rollouts,
        "max_policy_lag_optimizer_steps": spec.max_policy_lag,
        "max_group_age_optimizer_steps": spec.max_group_age,
        "fully_async": spec.fully_async,
        "publication_mode": spec.core.publication_mode,
        "overlapped": spec.overlaps,
        "tis": spec.uses_tis,
        "packing": spec.packing,
        "routing_replay": spec.training.use_rollout_routing_replay,
    }


def _scoring_pass(spec: RunSpec) -> dict[str, Any]:
    """As far as the run file decides it; a dropout in the model asks for a pass."""
    plan = scoring_plan(spec)
    return {
        "standalone": plan.standalone,
        "reason": plan.reason,
        "optimizer_steps_per_collection": spec.steps_per_update,
        "check_interval": spec.core.scoring_check_interval,
        "check_tolerance": spec.core.scoring_check_tolerance,
    }


def _allocation(spec: RunSpec, shape: ModelShape | None) -> dict[str, Any]:
    demand = spec.gpu_demand
    takes_gpus = demand is not None
    return {
        "fleet": spec.launch.fleet,
        "placement": spec.placement.mode,
        "gpus": topology(demand).document() if demand else None,
        "gpu_memory": gpu_memory(spec, shape).document() if shape and takes_gpus else None,
        "trainer_processes": spec.trainer.num_processes,
        "trainer_threads": spec.trainer.num_threads,
        "engine_processes": spec.inference.num_engines,
        "engine_threads": spec.inference.num_threads,
        "producer_processes": 1,
        "router_processes": int(spec.fully_async),
        "evaluation_processes": int(has_background_evaluation(spec)),
        "request_slots": spec.inference.num_engines * spec.inference.max_running_requests,
    }
