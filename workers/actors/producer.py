"""The producer actor: a thin Ray shell around ``activities.rollout.producer.RolloutProducer``."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from activities.rollout.producer import RolloutProducer
from activities.site import spec_of, store_of
from activities.storage import layout
from activities.storage.local_copy import local_folder
from activities.verifiers.registry import build_verifiers
from configs.run import RunSpec
from models.errors import ProducerLost
from models.evaluation import EvaluateRequest, EvaluationReport
from models.ids import FenceToken
from models.ports import ServingReport, StageProgress
from models.prompt import DataState
from models.rollout import CollectRequest, RolloutCollection
from workers.actors.allocator import return_freed_memory
from workers.actors.garbage import freeze_living_objects
from workers.actors.order import ActorFacts, ActorOrder, describe, enter
from workers.actors.preparation import PreparedRun
from workers.sources.prompts import load_prompts


class ProducerActor:
    """Asyncio actor: every method runs on one event loop, none blocks it."""

    def __init__(self, order: ActorOrder) -> None:
        self._order = order
        self._spec = spec_of(order.run)
        enter(order, self._spec, threads=1)
        return_freed_memory()
        self._producer: RolloutProducer | None = None

    async def start(self, epoch: int, prepared: PreparedRun, state: DataState) -> ActorFacts:
        """Read the prepared prompts and begin at ``state``; no engine is routed to yet.

        Epochs before ``epoch`` are refused.
        """
        producer = await asyncio.to_thread(_build, self._order, self._spec, prepared, state)
        producer.revoke(epoch - 1)
        freeze_living_objects()
        self._producer = producer
        return await self.facts()

    async def collect(self, token: FenceToken, request: CollectRequest) -> RolloutCollection:
        """See ``ProducerPort.collect``."""
        return await self._ready().collect(token, request)

    async def evaluate(self, token: FenceToken, request: EvaluateRequest) -> EvaluationReport:
        """See ``ProducerPort.evaluate``."""
        return await self._ready().evaluate(token, request)

    async def data_state(self, consumed_through: int) -> DataState:
        """See ``ProducerPort.data_state``."""
        return await self._ready().data_state(consumed_through)

    async def set_engines(
        self, token: FenceToken, urls: tuple[str, ...], healed: bool = False
    ) -> None:
        """See ``ProducerPort.set_engines``."""
        await self._ready().set_engines(token, urls, healed=healed)

    async def begin_publication(self, token: FenceToken, version: int) -> None:
        """See ``ProducerPort.begin_publication``."""
        await self._ready().begin_publication(token, version)

    async def end_publication(self, token: FenceToken, version: int) -> None:
        """See ``ProducerPort.end_publication``."""
        await self._ready().end_publication(token, version)

    async def reports(self, after: int) -> tuple[ServingReport, ...]:
        """See ``ProducerPort.reports``."""
        return await self._ready().reports(after)

    async def progress(self) -> StageProgress:
        """See ``ProducerPort.progress``."""
        return await self._ready().progress()

    async def revoke(self, epoch: int) -> None:
        """Refuse every token of ``epoch`` and below and end their stages."""
        self._ready().revoke(epoch)

    async def close(self) -> None:
        """End every stage, connection and verifier process."""
        if self._producer is not None:
            await self._producer.close()

    async def facts(self) -> ActorFacts:
        """Who this is."""
        return describe(self._order, serving=self._producer is not None)

    def _ready(self) -> RolloutProducer:
        if self._producer is None:
            raise ProducerLost(f"the producer of {self._order.run.run_id} is still starting")
        return self._producer


def _build(
    order: ActorOrder, spec: RunSpec, prepared: PreparedRun, state: DataState
) -> RolloutProducer:
    store = store_of(order.run)
    return RolloutProducer(
        spec=spec,
        store=store,
        run=order.run,
        train=load_prompts(store, "train"),
        held_out=load_prompts(store, "eval"),
        verifiers=build_verifiers(),
        decode=decoder(local_folder(store, layout.PREPARED_MODEL)),
        state=state,
        eos_token_ids=prepared.eos_token_ids,
        vocab_size=prepared.vocab_size,
    )


def decoder(model_dir: Path) -> Callable[[list[int]], str]:
    """Token ids -> text without special tokens, as the tokenizer of ``model_dir`` decodes.

    Reads ``tokenizer.json`` alone where there is one: transformers takes seconds to import.
    """
    fast = model_dir / "tokenizer.json"
    if fast.is_file():
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(fast))
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
    import transformers

    slow = transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    return lambda ids: str(slow.decode(ids, skip_special_tokens=True))
