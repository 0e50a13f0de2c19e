"""The engine actor: an engine server of the back end that the run file names."""

from pathlib import Path

from activities.site import store_of
from activities.storage import layout
from configs.run import RunSpec
from workers.actors.order import ActorOrder, engine_threads, num_cores
from workers.actors.server import ServerActor, module_command
from workers.engines.process import ServerCommand


class EngineActor(ServerActor):
    """Serves the prepared model until the first publication."""

    def command(self) -> ServerCommand:
        """See ``server_command``."""
        return server_command(self._order, self._spec)


def server_command(
    order: ActorOrder, spec: RunSpec, model: Path | None = None, version: int | None = None
) -> ServerCommand:
    """Command line and environment of the engine back end that ``spec`` names.

    Args:
        order: what the engine is made for.
        spec: the run file.
        model: folder to serve; default: the prepared model.
        version: policy version that it serves from the start; default: none that counts.
    """
    threads = engine_threads(spec, num_cores())
    inference = spec.inference
    folder = model or store_of(order.run).local_path(layout.PREPARED_MODEL)
    options = [
        *("--model-path", str(folder)),
        *("--dtype", inference.dtype, "--num-threads", str(threads)),
        *("--max-running-requests", str(inference.max_running_requests)),
        *("--max-queued-requests", str(inference.max_queued_requests)),
        *("--kv-budget-mib", str(inference.kv_cache_mib)),
        *("--context-length", str(spec.core.max_context_length)),
    ]
    if inference.deterministic:
        options.append("--deterministic")
    if spec.training.use_rollout_routing_replay and model is None:  # evaluation needs no routes
        options.append("--enable-return-routed-experts")
    if version is not None:
        options += ["--weight-version", str(version)]
    return module_command(order, spec, f"workers.engines.{inference.engine}", options, threads)
