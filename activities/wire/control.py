"""The control calls of one engine: pause, new weights, memory, resume. One call is one request.

What would end the server, or make it serve weights that nobody knows, is refused before it is
sent, see ``engine_guard``: one client pauses an engine, updates it and resumes it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import httpx

from activities.wire.connection import EngineConnection, OwnLimit
from activities.wire.contract import (
    ABORT_REQUEST,
    CHECKSUM_ACTIONS,
    CONTINUE_GENERATION,
    DESTROY_WEIGHTS_UPDATE_GROUP,
    FLUSH_CACHE,
    FREEZE_GC,
    GENERATE,
    HEALTH,
    INIT_WEIGHTS_UPDATE_GROUP,
    MODEL_INFO,
    PAUSE_GENERATION,
    RELEASE_MEMORY_OCCUPATION,
    RESUME_MEMORY_OCCUPATION,
    RID_PATTERN,
    SERVER_INFO,
    UPDATE_WEIGHT_VERSION,
    UPDATE_WEIGHTS_FROM_DISK,
    UPDATE_WEIGHTS_FROM_DISTRIBUTED,
    UPDATE_WEIGHTS_FROM_TENSOR,
    WEIGHTS_CHECKER,
    InitWeightsUpdateGroup,
    MemoryTag,
    PauseMode,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
    WeightUpdate,
)
from activities.wire.engine_guard import BUCKET, EngineGuard
from activities.wire.memory_marks import MemoryState, memory_state, moving_mark, settled_mark
from activities.wire.router_contract import ROUTER_RELEASE, ReleaseOrder
from models.errors import ContractViolation
from models.publication import ChecksumKind, TensorMeta

CONTROL_TIMEOUT_S = OwnLimit(60.0)
"""For calls that an engine answers once its current batch has ended."""
QUICK_TIMEOUT_S = OwnLimit(10.0)
CHECKSUM_TIMEOUT_S = OwnLimit(120.0)
_SAMPLING_MIX = ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 2}, {"top_p": 0.5})


class EngineControls(EngineConnection):
    """Control calls, each with a deadline in seconds.

    One raises ``ServiceUnreachable`` without an answer within the deadline, and
    ``ContractViolation`` when the engine refused or the call must not be sent.
    """

    def __init__(
        self,
        url: str,
        transport: httpx.AsyncBaseTransport | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__(url, transport, token)
        self._guard = EngineGuard(self.url)
        self._memory: MemoryState | None = None

    async def health(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the engine generates: 200 on ``/health`` in time.

        It says no 20 s into any pause, and never answers in less than a second. It alone tells of
        a server whose other calls are answered and whose requests hang.
        """
        return await self._answers(HEALTH, timeout_s)

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the engine's scheduler answers, also while paused; not while it loads weights."""
        return await self._answers(SERVER_INFO, timeout_s)

    async def model_info(self, *, timeout_s: float = QUICK_TIMEOUT_S) -> dict[str, Any]:
        """``model_path``, ``weight_version`` and whatever else the engine tells of its model."""
        info = await self._control("GET", MODEL_INFO, timeout_s)
        self._memory = memory_state(str(info.get("weight_version", "")))
        return info

    async def server_info(self, *, timeout_s: float = QUICK_TIMEOUT_S) -> dict[str, Any]:
        """The arguments that the server was started with, and what it measured at its start."""
        return await self._control("GET", SERVER_INFO, timeout_s)

    async def pause(self, mode: PauseMode, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Stop decoding: end live requests (abort), requeue them (retract) or hold them."""
        self._guard.pausing(mode)
        await self._control("POST", PAUSE_GENERATION, timeout_s, {"mode": mode})
        self._guard.paused(mode)

    async def resume(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Decode again after ``pause``. Refused while any memory is given back."""
        self._guard.require_memory("continue_generation", await self._state(), all_of_it=True)
        # SGLang would give what its allocator keeps back to the driver, and ask for it again with
        # the next batch. A release of memory and every flush by itself do so anyway.
        body = {"torch_empty_cache": False}
        await self._control("POST", CONTINUE_GENERATION, timeout_s, body)
        self._guard.resumed()

    async def flush_cache(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Drop cached prefixes; the engine waits for running requests within the deadline."""
        path = f"{FLUSH_CACHE}?timeout={timeout_s:g}"
        await self._call("POST", path, timeout_s, {})

    async def freeze_garbage(self, *, timeout_s: float = QUICK_TIMEOUT_S) -> None:
        """Let an SGLang server's processes search what their start left for garbage no more."""
        await self._call("POST", FREEZE_GC, timeout_s)

    async def warm_sampling(self, *, timeout_s: float) -> None:
        """Let an SGLang server sample in one batch what wants different things of its sampler."""
        body = {
            "input_ids": [[0]] * len(_SAMPLING_MIX),
            "sampling_params": [{"max_new_tokens": 2, **each} for each in _SAMPLING_MIX],
            "return_logprob": True,
        }
        await self._call("POST", GENERATE, timeout_s, body)

    async def abort(self, rid: str, *, timeout_s: float = QUICK_TIMEOUT_S) -> None:
        """End one request; its tokens so far are answered to whoever waits for it."""
        if RID_PATTERN.fullmatch(rid) is None:
            raise ContractViolation(
                f"{self.url}: abort of {rid!r} is not sent: an id that is not 32 hexadecimal "
                "digits may begin other ids, which would end as well"
            )
        await self._call("POST", ABORT_REQUEST, timeout_s, {"rid": rid})

    async def abort_all(self, *, timeout_s: float = QUICK_TIMEOUT_S) -> None:
        """End every request of the engine."""
        await self._call("POST", ABORT_REQUEST, timeout_s, {"abort_all": True})

    async def release_groups(
        self, groups: tuple[str, ...], *, timeout_s: float = QUICK_TIMEOUT_S
    ) -> None:
        """Tell a router that these groups ended early: it reserves nothing for them any more."""
        body = ReleaseOrder(groups=groups).model_dump()
        await self._call("POST", ROUTER_RELEASE, timeout_s, body)

    async def update_weights_from_disk(
        self, path: str, version: int | None, timeout_s: float, *, flush_cache: bool = True
    ) -> None:
        """Load the folder ``path`` and serve it as ``version``.

        In this and the other updates ``flush_cache`` needs ``pause("abort")``, and without a
        version the engine goes on naming the former one: the last call of an update brings it.
        """
        await self._update(
            UPDATE_WEIGHTS_FROM_DISK,
            UpdateWeightsFromDisk(model_path=path, **_common(version, flush_cache)),
            timeout_s,
        )

    async def update_weights_from_tensor(
        self,
        handles: Mapping[str, str],
        engine_gpus: Sequence[str],
        version: int | None,
        timeout_s: float,
        *,
        flush_cache: bool = True,
    ) -> None:
        """Load a bucket of tensors that another process holds on the engine's own GPUs.

        Args:
            handles: GPU -> serialized handle of the copy there; see ``WeightBucket.handles``.
            engine_gpus: GPUs of the engine's processes, in the order of their ranks.
            version: served afterwards.
            timeout_s: seconds for the call.
            flush_cache: drop cached prefixes.
        """
        self._guard.require_handles(handles, engine_gpus)
        body = UpdateWeightsFromTensor(
            serialized_named_tensors=[handles[gpu] for gpu in engine_gpus],
            load_format=BUCKET,
            **_common(version, flush_cache),
        )
        await self._update(UPDATE_WEIGHTS_FROM_TENSOR, body, timeout_s)

    async def init_weights_update_group(
        self, group: InitWeightsUpdateGroup, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Join a group whose rank 0 sends weights. A name serves one attempt, a failed one too."""
        self._guard.opening_group(group.group_name)
        await self._succeed(INIT_WEIGHTS_UPDATE_GROUP, group.model_dump(), timeout_s)
        self._guard.opened_group(group.group_name)

    def adopt_weights_update_group(self, name: str) -> None:
        """Count on a group that the engine has joined at another client's request."""
        self._guard.opened_group(name)

    async def destroy_weights_update_group(
        self, name: str, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Leave a group."""
        self._guard.closed_group(name)
        await self._succeed(DESTROY_WEIGHTS_UPDATE_GROUP, {"group_name": name}, timeout_s)

    async def update_weights_from_distributed(
        self,
        group: str,
        tensors: Sequence[TensorMeta],
        version: int | None,
        timeout_s: float,
        *,
        load_format: str | None = BUCKET,
        flush_cache: bool = True,
    ) -> None:
        """Receive ``tensors`` in order while rank 0 of ``group`` broadcasts them."""
        self._guard.require_broadcast(group, tensors)
        body = UpdateWeightsFromDistributed(
            names=[each.name for each in tensors],
            dtypes=[each.dtype for each in tensors],
            shapes=[list(each.shape) for each in tensors],
            group_name=group,
            load_format=load_format,
            **_common(version, flush_cache),
        )
        await self._update(UPDATE_WEIGHTS_FROM_DISTRIBUTED, body, timeout_s)

    async def set_weight_version(self, version: int, *, timeout_s: float = QUICK_TIMEOUT_S) -> None:
        """Name the weights that the engine holds; moves nothing. Needs all of its memory."""
        self._guard.require_memory("update_weight_version", await self._state(), all_of_it=True)
        await self._set_version(str(version), timeout_s)

    async def checksums(
        self, kind: ChecksumKind = "xxh3_64", *, timeout_s: float = CHECKSUM_TIMEOUT_S
    ) -> dict[str, str]:
        """Name -> 16 hex digits of every live tensor's bytes, all ranks merged."""
        action = {"action": CHECKSUM_ACTIONS[kind]}
        answer = await self._control("POST", WEIGHTS_CHECKER, timeout_s, action)
        if answer.get("success") is not True or not answer.get("ranks"):
            raise ContractViolation(
                f"{self.url}: no weight checksums: {answer.get('message', answer)}"
            )
        merged: dict[str, str] = {}
        for rank in answer["ranks"]:
            for name, checksum in rank["checksums"].items():
                if merged.setdefault(name, checksum) != checksum:
                    raise ContractViolation(f"{self.url}: ranks disagree on the bytes of {name}")
        return merged

    async def release_memory(
        self, tags: Collection[MemoryTag], *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Give back the GPU memory of ``tags``; what is given back already stays so.

        Needs ``pause("abort")``. The weight version names no policy from here to the next update.
        """
        self._guard.require_paused("release_memory_occupation", idle=True)
        self._guard.require_saver(await self.server_info())
        released = (await self._known("release_memory_occupation")).released
        wanted = frozenset(tags) - released
        if wanted:
            await self._settle(timeout_s)
            await self._move(RELEASE_MEMORY_OCCUPATION, wanted, released | wanted, timeout_s)

    async def resume_memory(
        self, tags: Collection[MemoryTag], *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> None:
        """Take back the GPU memory of ``tags``. Weights are garbage until the next update."""
        self._guard.require_paused("resume_memory_occupation", idle=True)
        released = (await self._known("resume_memory_occupation")).released
        wanted = released & frozenset(tags)
        if wanted:
            await self._move(RESUME_MEMORY_OCCUPATION, wanted, released - wanted, timeout_s)
            # It had come to rest when it gave memory back, and took no request without.
            self._guard.settled()

    async def _move(
        self, path: str, tags: frozenset[str], released: frozenset[str], timeout_s: float
    ) -> None:
        """Move ``tags`` with ``path``; ``released`` is what is given back afterwards."""
        await self._set_version(moving_mark(tags), timeout_s)
        await self._call("POST", path, timeout_s, {"tags": sorted(tags)})
        await self._set_version(settled_mark(released), timeout_s)

    async def _set_version(self, version: str, timeout_s: float) -> None:
        # What the engine has is unknown to this client until the call has come back.
        self._memory = None
        body = {"new_version": version, "abort_all_requests": False}
        await self._succeed(UPDATE_WEIGHT_VERSION, body, timeout_s)
        self._memory = memory_state(version)

    async def _state(self) -> MemoryState:
        """What memory the engine has, as it said last."""
        if self._memory is None:
            await self.model_info()
        assert self._memory is not None  # model_info has set it
        return self._memory

    async def _known(self, what: str) -> MemoryState:
        state = await self._state()
        self._guard.require_known(what, state)
        return state

    async def _update(self, path: str, update: WeightUpdate, timeout_s: float) -> None:
        what = path.removeprefix("/")
        self._guard.require_paused(what, idle=update.flush_cache)
        # The version must not hide that memory is still given back.
        names = update.weight_version is not None
        self._guard.require_memory(what, await self._state(), all_of_it=names)
        if update.flush_cache:
            await self._settle(timeout_s)
        await self._succeed(path, update.model_dump(exclude_none=True), timeout_s)

    async def _settle(self, timeout_s: float) -> None:
        """Let the engine come to rest after ``pause("abort")``.

        A request whose client hung up is over for the server's door while its scheduler computes
        another step of it, and a scheduler that is not idle ends at a flush or without its memory.
        Once in a pause is enough.
        """
        if not self._guard.at_rest:
            await self.flush_cache(timeout_s=min(timeout_s, CONTROL_TIMEOUT_S))
            self._guard.settled()

    async def _succeed(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        """A call whose answer must say ``success``."""
        answer = await self._control("POST", path, timeout_s, body)
        if answer.get("success") is not True:
            raise ContractViolation(f"{self.url}: POST {path} failed: {answer.get('message')}")


def _common(version: int | None, flush_cache: bool) -> dict[str, Any]:
    return {
        "weight_version": None if version is None else str(version),
        "flush_cache": flush_cache,
    }
