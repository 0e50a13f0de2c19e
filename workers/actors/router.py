"""The router actor of a fully async run: one router process."""

from activities.wire import health
from configs.run import RunSpec
from workers.actors.order import ActorOrder
from workers.actors.server import ServerActor, module_command
from workers.engines.process import ServerCommand


class RouterActor(ServerActor):
    """Routes to nothing until it is given a table."""

    def command(self) -> ServerCommand:
        """See ``router_command``."""
        return router_command(self._order, self._spec)


def router_command(order: ActorOrder, spec: RunSpec) -> ServerCommand:
    """Command line of the router. A call may wait for as long as a publication may take."""
    factor, inference = order.timeout_factor, spec.inference
    queue_timeout_s = factor * (inference.drain_timeout_s + inference.update_timeout_s)
    options = [
        *("--max-queued-requests", str(inference.router_max_queued_requests)),
        *("--queue-timeout-s", str(queue_timeout_s)),
        *("--health-timeout-s", str(factor * health.TIMEOUT_S)),
        *("--group-expiry-s", str(factor * inference.request_timeout_s)),
    ]
    return module_command(order, spec, "workers.engines.router", options, threads=1)
