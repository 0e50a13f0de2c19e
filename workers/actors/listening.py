"""Where the servers of a node listen: on loopback, or on the node's address for those of others."""

import sys

from models.errors import ConfigurationError
from workers.actors.order import ActorOrder

LOOPBACK = "127.0.0.1"


def listen_host(order: ActorOrder) -> str:
    """The address that a server of ``order`` is to listen on.

    Where callers need a token, it is the one by which the Ray cluster knows this node, so that an
    engine may be on another node than the producer. Without a token it is loopback.

    Raises:
        ConfigurationError: there are other nodes, and no token.
    """
    if "ray" not in sys.modules:
        return LOOPBACK
    import ray

    if not ray.is_initialized():
        return LOOPBACK
    node = str(ray.util.get_node_ip_address())
    if order.engine_token is not None or node.startswith("127."):
        return node
    others = {each["NodeManagerAddress"] for each in ray.nodes() if each["Alive"]} - {node}
    if others:
        raise ConfigurationError(
            f"{order.name} on {node} would serve {', '.join(sorted(others))} without asking who "
            "calls; start every node and worker with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN, "
            "or with one PERDURE_ENGINE_TOKEN"
        )
    return LOOPBACK
