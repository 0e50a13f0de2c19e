"""The engine actor: an engine server of the back end that the run file names."""

import json
from pathlib import Path
from typing import NamedTuple

from activities.site import store_of
from activities.storage import layout
from activities.storage.local_copy import local_folder
from configs.run import RunSpec
from workers.actors.order import ActorOrder, engine_threads, num_cores
from workers.actors.server import ServerActor, module_command
from workers.engines.process import ServerCommand
from workers.engines.sglang.arguments import server_arguments, server_environment
from workers.engines.sglang.own_head import require_own_head


class EngineActor(ServerActor):
    """Serves the prepared model until the first publication."""

    def command(self) -> ServerCommand:
        """See ``server_command``."""
        return server_command(self._order, self._spec)


def server_command(
    order: ActorOrder, spec: RunSpec, model: Path | None = None, version: int | None = None
) -> ServerCommand:
    """Command line and environment of the engine back end that ``spec`` names. Blocks.

    The model comes to this host first.

    Args:
        order: what the engine is made for.
        spec: the run file.
        model: folder to serve; default: the prepared model.
        version: policy version that it serves from the start; default: none that counts.

    Raises:
        ConfigurationError: SGLang would serve the model wrongly.
    """
    folder = model or local_folder(store_of(order.run), layout.PREPARED_MODEL)
    # An evaluation needs no routes.
    with_routes = spec.training.use_rollout_routing_replay and model is None
    build = _sglang if spec.inference.engine == "sglang" else _native
    return build(order, spec, Served(folder, with_routes, version))


class Served(NamedTuple):
    """What an engine serves."""

    folder: Path
    with_routes: bool
    version: int | None


def _native(order: ActorOrder, spec: RunSpec, served: Served) -> ServerCommand:
    threads, inference = engine_threads(spec, num_cores()), spec.inference
    options = [
        *("--model-path", str(served.folder)),
        *("--dtype", inference.dtype, "--num-threads", str(threads)),
        *("--max-running-requests", str(inference.max_running_requests)),
        *("--max-queued-requests", str(inference.max_queued_requests)),
        *("--kv-budget-mib", str(inference.kv_cache_mib)),
        *("--context-length", str(spec.core.max_context_length)),
    ]
    if inference.deterministic:
        options.append("--deterministic")
    if served.with_routes:
        options.append("--enable-return-routed-experts")
    if served.version is not None:
        options += ["--weight-version", str(served.version)]
    return module_command(order, spec, "workers.engines.native", options, threads)


def _sglang(order: ActorOrder, spec: RunSpec, served: Served) -> ServerCommand:
    config = json.loads((served.folder / "config.json").read_bytes())
    require_own_head(served.folder, config)
    arguments = server_arguments(
        spec, served.folder, config, with_routes=served.with_routes, version=served.version
    )
    return module_command(
        order,
        spec,
        "workers.engines.sglang",
        ["--arguments", json.dumps(arguments)],
        engine_threads(spec, num_cores()),
        server_environment(spec),
    )
