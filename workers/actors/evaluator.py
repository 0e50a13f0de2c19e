"""The evaluator actor: one engine on a snapshot, the held-out set sampled and scored on it.

It ends with the process that made it, so an evaluation that is given up leaves nothing behind; the
run's own fleet, its end included, does not touch it.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from activities.background.sampling import HeldOutSampling
from activities.rollout.collection_file import write_collection
from activities.rollout.held_out import evaluation_report
from activities.site import store_of
from activities.storage import layout
from activities.storage.local_copy import local_folder
from activities.verifiers.registry import build_verifiers
from activities.wire import health
from activities.wire.client import EngineClient
from activities.wire.digest import weights_digest
from configs.run import RunSpec
from models.background import BackgroundOrder
from models.errors import (
    ConfigurationError,
    ContractViolation,
    DigestMismatch,
    EngineLost,
    ServiceUnreachable,
)
from models.evaluation import EvaluateRequest, EvaluationReport
from models.ports import StageProgress
from workers.actors.engine import server_command
from workers.actors.order import ActorOrder, engine_threads, enter, num_cores
from workers.actors.preparation import find_prepared
from workers.actors.producer import decoder
from workers.actors.server import ServerActor
from workers.engines.process import ServerCommand
from workers.sources.prompts import load_prompts

GRACE_S = 3.0
"""For the engine's clean end."""

T = TypeVar("T")


class EvaluatorActor(ServerActor):
    """Asyncio actor for one ``BackgroundOrder``."""

    def __init__(self, order: ActorOrder, job: BackgroundOrder) -> None:
        super().__init__(order)
        enter(order, self._spec, threads=1)
        self._job = job
        self._store = store_of(job.run)
        self._sampling: HeldOutSampling | None = None

    def command(self) -> ServerCommand:
        """An engine that serves the snapshot under its policy version from the start."""
        snapshot = self._job.snapshot
        folder = local_folder(self._store, snapshot.folder)
        return server_command(self._order, engine_spec(self._spec), folder, snapshot.policy_version)

    async def evaluate(self) -> EvaluationReport:
        """See ``EvaluatorPort.evaluate``; ends by itself at the order's deadline."""
        limit_s = self._job.timeout_s * self._order.timeout_factor
        try:
            async with asyncio.timeout(limit_s):
                return await self._evaluate()
        except TimeoutError as error:
            raise ServiceUnreachable(
                f"{self._job.experiment_id} was not done after {limit_s:g} s (evaluation.timeout_s)"
            ) from error

    async def progress(self) -> StageProgress:
        """See ``EvaluatorPort.progress``."""
        stage = f"evaluate snapshot {self._job.snapshot.update}"
        if self._sampling is None:
            return StageProgress(stage=stage, detail="the engine is starting")
        done, total = self._sampling.samples_done, self._sampling.samples_total
        return StageProgress(stage=stage, done=done, total=total)

    async def close(self) -> None:
        """End sampling, verifier processes and the engine."""
        if self._sampling is not None:
            await self._sampling.aclose()
        await self.stop(GRACE_S)

    async def _evaluate(self) -> EvaluationReport:
        facts = await self.start()
        url, snapshot = facts.status.url, self._job.snapshot
        if url is None:
            raise EngineLost(f"the engine of {self._job.experiment_id} has no address")
        await self._verify(url)
        self._sampling = await asyncio.to_thread(self._build)
        started = time.monotonic()
        groups = await self._while_serving(url, self._sampling.run(url, snapshot.policy_version))
        request = EvaluateRequest(
            run=self._job.run,
            epoch=0,
            update=snapshot.update,
            policy_version=snapshot.policy_version,
            phase=self._job.phase,
        )
        uri = f"{layout.eval_results(self._job.receipt)}/{layout.EVAL_SAMPLES}"
        report = evaluation_report(request, groups, uri, time.monotonic() - started)
        sha256 = await asyncio.to_thread(write_collection, self._store, uri, groups)
        return report.model_copy(update={"sha256": sha256})

    async def _verify(self, url: str) -> None:
        """The engine's live tensors are those that the trainer exported."""
        snapshot = self._job.snapshot
        async with contextlib.aclosing(EngineClient(url)) as client:
            version = (await client.model_info()).get("weight_version")
            digest = weights_digest(await client.checksums())
        if version != str(snapshot.policy_version):
            raise ContractViolation(
                f"{url} serves version {version!r} of {snapshot.folder}, not "
                f"{snapshot.policy_version}"
            )
        if digest != snapshot.digest:
            raise DigestMismatch(
                f"{url}: the weights of {snapshot.folder} have digest {digest} in the engine, the "
                f"trainer exported {snapshot.digest}"
            )

    def _build(self) -> HeldOutSampling:
        prepared = find_prepared(self._store, self._job.run.spec_sha256)
        if prepared is None:
            raise ConfigurationError(
                f"{self._store.root}/prepared was made for another run file; start the run again"
            )
        return HeldOutSampling(
            self._spec,
            load_prompts(self._store, "eval"),
            build_verifiers(),
            decoder(local_folder(self._store, layout.PREPARED_MODEL)),
            prepared.eos_token_ids,
            prepared.vocab_size,
        )

    async def _while_serving(self, url: str, work: Coroutine[Any, Any, T]) -> T:
        """Result of ``work``; ``EngineLost`` as soon as the engine ends or hangs in front of it."""
        working = asyncio.ensure_future(work)
        ending = asyncio.ensure_future(self.wait_exit())
        hanging = asyncio.ensure_future(self._hangs(url))
        tasks = (working, ending, hanging)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if not ending.done():
                raise EngineLost(
                    f"the engine of {self._job.experiment_id} lives and generates nothing: "
                    f"{health.FAILURES} looks at it failed in a row"
                )
            raise EngineLost(
                f"the engine of {self._job.experiment_id} ended with status "
                f"{ending.result().returncode}; end of its log:\n{ending.result().log_tail}"
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hangs(self, url: str) -> None:
        """Return when the engine hangs."""
        async with contextlib.aclosing(EngineClient(url)) as client:
            await health.until_hung(client, health.TIMEOUT_S * self._order.timeout_factor)


def engine_spec(spec: RunSpec) -> RunSpec:
    """``spec`` with the evaluating engine's threads as those of an engine."""
    threads = spec.evaluation.num_threads or engine_threads(spec, num_cores())
    inference = spec.inference.model_copy(update={"num_threads": threads})
    return spec.model_copy(update={"inference": inference})
