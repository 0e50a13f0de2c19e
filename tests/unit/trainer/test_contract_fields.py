"""Every event of a training contract has the fields that its readers rely on."""

from routed_groups import routed

from activities.storage import layout
from activities.storage.store import Store
from workers.trainers.local import LocalTrainer

FIELDS = {
    "score_timing": "rollout_id seconds model_tokens row_specialization",
    "scores": "rollout_id source active_tokens max_abs p50_upper p95_upper p99_upper "
    "histogram_upper_edges histogram_counts groups",
    "refresh_scores": "rollout_id mixed_responses response_count active_tokens "
    "current_version_token_fraction latest_forward",
    "scoring_check": "active_tokens mean_abs max_abs tokens_above_edge edge tolerance",
    "packing": "step rollout_id samples packs model_tokens max_pack_tokens token_budget "
    "fill_fraction samples_per_pack",
    "router_load": "step rollout_id scope routing_replay summary layers replicas",
    "replay_routes": "rollout_id phase tokens captured_tokens synthetic_tail_tokens samples "
    "mismatches layers",
    "optimizer": "step rollout_id normalization auxiliary_denominator "
    "auxiliary_response_denominator router_objective reduction scoring_pass local_policy_objective "
    "local_auxiliary_objective local_behavior_versions local_microbatches stopping_microbatches "
    "lr_used lr_next published_step optimizer_skipped elapsed_seconds "
    "local_pre_optimizer_gradients sampled_model_updates",
}
NESTED = {
    ("scores", "groups"): "first_third middle_third last_third length_le_1024 length_1025_4096 "
    "length_gt_4096",
    ("refresh_scores", "latest_forward"): "tokens mean_abs_logratio max_abs_logratio "
    "tis_clip_fraction",
    ("router_load", "summary"): "moe/max_expert_load moe/dead_experts "
    "moe/dead_experts_max_per_layer moe/load_cv_mean moe/load_cv_max moe/max_mean_load_ratio "
    "moe/replica_load_cv_max moe/replica_max_mean_load_ratio "
    "moe/replica_dead_experts_max_per_layer",
    ("optimizer", "normalization"): "samples active_tokens token_denominator model_tokens "
    "world_size",
    ("optimizer", "local_auxiliary_objective"): "load_balancing router_z",
}


def test_events_have_the_fields_of_the_contract(make_spec, make_groups, mixture_dir):
    """Of an update with a scoring pass, and of one with a check instead."""
    seen = {}
    core = {"replay_diagnostics": True, "max_policy_lag": 8, "publication_mode": "refresh"}
    for required in (False, True):
        spec = make_spec(
            core=core | {"scoring_pass_required": required},
            training={"use_rollout_routing_replay": True},
        )
        LocalTrainer(spec, mixture_dir).optimize(0, "a", routed(make_groups(), mixture_dir))
        rows, _ = Store(spec.output.root).read_jsonl(layout.TRAINING_CONTRACT)
        seen |= {row["event"]: row for row in rows}
    for event, fields in FIELDS.items():
        assert seen[event].keys() >= {"schema_version", "rank", *fields.split()}, event
    for (event, field), names in NESTED.items():
        assert seen[event][field].keys() == set(names.split()), (event, field)
