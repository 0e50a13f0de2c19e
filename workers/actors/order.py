"""What an actor is made for, what it says about itself, and the environment that it lives in."""

import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil
from pydantic import SecretStr

from activities.wire.token import ENGINE_TOKEN, engine_token
from configs.run import RunSpec
from models.base import Frozen
from models.errors import ConfigurationError
from models.ids import RunRef
from models.ports import ActorStatus
from workers.compiler_cache.transfer import cache_variables
from workers.source_digest import package_folders, source_digest

_NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""SGLang runs so, and a broadcast fails between processes that differ in it."""
_GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Packs differ in length: segments that grow keep memory in one piece. Not where weights are handed
to engines on the same GPU: other processes cannot always open such memory."""


class ActorOrder(Frozen):
    """One actor of a run. The actor reads the run file from ``run.root`` itself."""

    run: RunRef
    role: str
    """``trainer``, ``engine``, ``router``, ``producer``, ``preparation`` or ``evaluator``."""
    rank: int = 0
    incarnation: int = 0
    scratch: str
    """A folder of this host for logs, ready files and caches of the run; removed at the end."""
    timeout_factor: float = 1.0
    """The infrastructure multiplier of the worker that gives the order."""
    gpus: tuple[str, ...] = ()
    """Devices of the trainer that a colocated engine shares; it has none of Ray's."""
    engine_token: SecretStr | None = None
    """What engines and router of the fleet ask for; None: they answer everybody."""
    last_failure: str = ""
    """Kind of the error that ended the life before; empty when nothing failed."""
    reason: str = ""
    """Why there is a life after the first."""

    @property
    def name(self) -> str:
        """Name of the actor within the run's namespace."""
        return actor_name(self.role, self.rank)


class ActorFacts(Frozen):
    """What a live actor answers about itself."""

    order: ActorOrder
    actor_pid: int
    status: ActorStatus
    serving: bool = False
    """Started completely and still fit to go on."""
    next_update: int | None = None
    """Trainer only: index of the update that it would apply next."""
    last_batch_sha256: str | None = None
    """Trainer only: digest of the collection that it trained last."""


def fleet_token() -> SecretStr | None:
    """The token that this worker's orders carry."""
    token = engine_token()
    return None if token is None else SecretStr(token)


def actor_name(role: str, rank: int) -> str:
    """``trainer``, ``producer``, ``router``, ``preparation``, ``engine-0``, ``engine-1`` ..."""
    return f"engine-{rank}" if role == "engine" else role


def parse_actor_name(name: str) -> tuple[str, int] | None:
    """Role and rank of an actor's name; None for a name that no fleet gives."""
    if name in ("trainer", "producer", "router"):
        return (name, 0)
    role, _, rank = name.rpartition("-")
    return ("engine", int(rank)) if role == "engine" and rank.isdecimal() else None


def describe(
    order: ActorOrder,
    *,
    pid: int | None = None,
    url: str | None = None,
    policy_version: int | None = None,
    serving: bool = False,
    next_update: int | None = None,
    last_batch_sha256: str | None = None,
) -> ActorFacts:
    """Facts of the calling actor; ``pid`` is the working process when it is not this one."""
    shown = pid or os.getpid()
    status = ActorStatus(
        role=order.role,
        rank=order.rank,
        pid=shown,
        host=socket.gethostname(),
        incarnation=order.incarnation,
        url=url,
        policy_version=policy_version,
        resident_bytes=_resident_bytes(shown),
        code_digest=source_digest(),
        gpus=visible_gpus(order),
        started_unix=_started_unix(shown),
        last_failure=order.last_failure,
        reason=order.reason,
    )
    return ActorFacts(
        order=order,
        actor_pid=os.getpid(),
        status=status,
        serving=serving,
        next_update=next_update,
        last_batch_sha256=last_batch_sha256,
    )


def enter(order: ActorOrder, spec: RunSpec, threads: int) -> None:
    """Set this process's environment; must come before torch or transformers are imported.

    Raises:
        ConfigurationError: torch is imported already, so thread settings would have no effect.
    """
    if "torch" in sys.modules:
        raise ConfigurationError(f"{order.name}: torch was imported before its environment was set")
    os.environ.update(environment(order, spec, threads))


def environment(order: ActorOrder, spec: RunSpec, threads: int) -> dict[str, str]:
    """Variables of a role: its GPUs, thread settings, private caches, then ``launch.env``."""
    scratch = Path(order.scratch)
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    gpus, token = visible_gpus(order), order.engine_token
    return {
        # Ray lets a process without GPUs see all of them.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        **(_NCCL if gpus else {}),
        **(_GROWING if gpus and order.role == "trainer" and not spec.colocated else {}),
        # Spinning OpenMP threads on busy cores are many times slower than sleeping ones.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # Processes that share a cache of generated model code race each other.
        "HF_MODULES_CACHE": tempfile.mkdtemp(prefix=f"hf-{order.name}-", dir=scratch),
        **cache_variables(order.name, scratch, {**os.environ, **spec.launch.env}),
        **spec.launch.env,
        **({ENGINE_TOKEN: token.get_secret_value()} if token is not None else {}),
    }


def visible_gpus(order: ActorOrder) -> tuple[str, ...]:
    """Devices of this process, as CUDA counts them on this host: those it was told, or Ray's."""
    if order.gpus or "ray" not in sys.modules:
        return order.gpus
    import ray

    if not ray.is_initialized():
        return ()
    held: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    # Ray keeps them in a set; rank r computes on the r-th.
    return tuple(sorted(held, key=lambda gpu: (len(gpu), gpu)))


def require_same_code(facts: ActorFacts, digest: str) -> None:
    """Refuse a new actor that runs other code than the process that made it."""
    if facts.status.code_digest != digest:
        folders = ", ".join(sorted({str(folder.parent) for folder in package_folders().values()}))
        raise ConfigurationError(
            f"{facts.order.name} of {facts.order.run.run_id} runs code "
            f"{facts.status.code_digest}, this worker runs {digest} (from {folders}); install the "
            "same version on the worker and on every Ray node, then restart the worker"
        )


def trainer_threads(spec: RunSpec, cores: int) -> int:
    """Torch threads of each trainer process: as asked, else its share of all cores.

    Of half of them when sampling overlaps.
    """
    share = cores // 2 if spec.samples_while_training else cores
    return spec.trainer.num_threads or max(1, share // spec.trainer.num_processes)


def engine_threads(spec: RunSpec, cores: int) -> int:
    """Torch threads of one engine: as asked, else its share of all cores, or of half of them."""
    share = cores // 2 if spec.samples_while_training else cores
    return spec.inference.num_threads or max(1, share // spec.inference.num_engines)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``variables`` on top, for a child process."""
    return os.environ | dict(variables)


def _started_unix(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None  # it has ended meanwhile


def _resident_bytes(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
