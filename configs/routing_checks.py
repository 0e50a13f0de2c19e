"""Checks between the keys of routers: layout, replay, its diagnostics, auxiliary losses.

Of a foreign model only the trainer knows whether it has routers; it refuses what contradicts them
when it loads.
"""

from collections.abc import Iterator

from configs.model import MOE_ARCHITECTURES
from configs.problem import Problem
from configs.run import RunSpec

_ROUTER_KEYS = ("use_rollout_routing_replay", "router_aux_loss_weight", "router_z_loss_weight")


def routing_problems(spec: RunSpec) -> Iterator[Problem]:
    """Every contradiction that the run file shows."""
    replay, packing = spec.training.use_rollout_routing_replay, spec.trainer.packing
    if packing == "shared_prompt" and (replay or spec.has_routers):
        yield Problem(
            "trainer.packing",
            "a mixture of experts needs every sample by itself: the load and the routes of its "
            "experts are per sample, and a shared prompt is computed once for many",
            packing,
            'remove the key, or set it to "documents"',
        )
    if spec.has_routers is False:
        yield from _dense_model_problems(spec)
    if spec.core.replay_diagnostics and not replay:
        yield Problem(
            "core.replay_diagnostics",
            "compares replayed routes, and none are replayed",
            True,
            "remove it, or set training.use_rollout_routing_replay",
        )


def _dense_model_problems(spec: RunSpec) -> Iterator[Problem]:
    """Keys of routers that are set, and the model has none."""
    remedy = "remove the key"
    if spec.model.source == "tiny":
        choices = ", ".join(MOE_ARCHITECTURES)
        remedy += f", or set model.tiny.architecture to one of {choices}"
    for name in _ROUTER_KEYS:
        value = getattr(spec.training, name)
        if value:
            yield Problem(
                f"training.{name}",
                "only goes with a mixture of experts, and the model is dense",
                value,
                remedy,
            )
