"""Which machine holds which GPUs of a run: the planner, pure arithmetic over a demand.

    trainer 4, rollout 12, 8 a node:  node 0 = 4 trainer + 4 rollout,  node 1 = 8 rollout

The trainer lives on one node. What is left there goes to engines, whole ones only, and the other
engines fill further nodes. Colocated engines live on the trainer's GPUs and add none.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from configs.problem import Problem

MAX_GPUS_PER_NODE = 8
"""Default capacity of a node."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed. All numbers are GPUs; those of the trainer are one a process."""

    trainer: int
    rollout: int
    tensor_parallel: int = 1
    """GPUs of one engine."""
    colocated: bool = False
    given_capacity: int | None = None
    """GPUs of a node, when somebody said so."""

    @property
    def policy(self) -> int:
        """GPUs of trainer and engines together."""
        return self.trainer if self.colocated else self.trainer + self.rollout

    @property
    def capacity(self) -> int:
        """GPUs of one node: as given, else what is needed up to ``MAX_GPUS_PER_NODE``."""
        return self.given_capacity or min(MAX_GPUS_PER_NODE, self.policy)


@dataclass(frozen=True, slots=True)
class Node:
    """GPUs of one node by who takes them; of colocated engines both count the same devices."""

    trainer_gpus: int
    rollout_gpus: int
    ray_gpus: int
    """What the cluster must show there."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The nodes of a run, the trainer's first."""

    nodes: tuple[Node, ...]
    gpus_per_replica: int
    """GPUs that each node must have."""
    policy_gpus: int

    @property
    def replicas(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def allocated_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.replicas * self.gpus_per_replica

    def summary(self) -> str:
        """In one line: ``2 nodes of 8 GPUs: 4 trainer + 4 rollout, 8 rollout``."""
        nodes = "node" if self.replicas == 1 else "nodes"
        shares = (
            " + ".join(
                f"{gpus} {role}"
                for gpus, role in ((node.trainer_gpus, "trainer"), (node.rollout_gpus, "rollout"))
                if gpus
            )
            + (" (the same)" if node.ray_gpus < node.trainer_gpus + node.rollout_gpus else "")
            for node in self.nodes
        )
        return f"{self.replicas} {nodes} of {self.gpus_per_replica} GPUs: {', '.join(shares)}"

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "summary": self.summary(),
            "replicas": self.replicas,
            "gpus_per_replica": self.gpus_per_replica,
            "allocated_gpus": self.allocated_gpus,
            "policy_gpus": self.policy_gpus,
            "unused_gpus": self.allocated_gpus - self.policy_gpus,
            "nodes": [asdict(node) for node in self.nodes],
        }


def topology(demand: Demand) -> Topology:
    """Lay ``demand``, of which ``topology_problems`` finds nothing wrong, over nodes."""
    if demand.policy <= demand.capacity:
        node = Node(demand.trainer, demand.rollout, demand.policy)
        return Topology((node,), demand.policy, demand.policy)
    capacity, parallel = demand.capacity, demand.tensor_parallel
    shared = min(demand.rollout, (capacity - demand.trainer) // parallel * parallel)
    nodes = [Node(demand.trainer, shared, demand.trainer + shared)]
    left = demand.rollout - shared
    while left:
        taken = min(left, capacity)
        nodes.append(Node(0, taken, taken))
        left -= taken
    return Topology(tuple(nodes), capacity, demand.policy)


def topology_problems(demand: Demand) -> Iterator[Problem]:
    """Why ``demand`` fits no set of equal nodes, in the words of the run file."""
    capacity, parallel = demand.capacity, demand.tensor_parallel
    node = f"a node has {capacity} GPUs (placement.gpus_per_node)"
    if demand.trainer > capacity:
        yield Problem(
            "trainer.num_processes",
            f"needs {demand.trainer} GPUs of one node, one a process, and {node}: "
            f"{demand.trainer} > {capacity}; a trainer lives on one node",
            demand.trainer,
            f"use at most {capacity}, or raise placement.gpus_per_node",
        )
    if parallel > capacity:
        yield Problem(
            "inference.tensor_parallel_size",
            f"an engine needs {parallel} GPUs of one node, and {node}: {parallel} > {capacity}",
            parallel,
            f"use at most {capacity}, or raise placement.gpus_per_node",
        )
    elif capacity % parallel and not demand.colocated and demand.policy > capacity:
        yield Problem(
            "inference.tensor_parallel_size",
            f"must divide the GPUs of a node, because engines never span nodes, and {node}: "
            f"{capacity} % {parallel} = {capacity % parallel}",
            parallel,
            f"use one of {', '.join(str(n) for n in range(1, capacity) if capacity % n == 0)}",
        )
