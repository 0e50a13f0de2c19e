"""A fake fleet whose engines are real native engine processes."""

from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import load_file

from activities.site import Site
from activities.wire.client import EngineClient
from activities.wire.digest import weights_digest
from activities.wire.router_client import RouterClient
from models.ids import FenceToken, RunRef
from models.ports import RouterHandle
from models.publication import WeightsRef
from tests.support.fake_engines import FakeEngine
from tests.support.fake_fleet import FakeFleet, ListTracker
from tests.support.publication_bench import PublicationBench, publication_bench
from tests.support.router_rig import RouterProcess


def weights_of(folder: Path, version: int) -> WeightsRef:
    """What a trainer would say that it exported into ``folder``."""
    tensors = load_file(folder / "model.safetensors")
    checksums = {
        name: xxhash.xxh3_64_hexdigest(tensor.numpy().tobytes()) for name, tensor in tensors.items()
    }
    return WeightsRef(
        version=version, path=str(folder), digest=weights_digest(checksums),
        num_tensors=len(tensors), num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        dtype="float32",
    )  # fmt: skip


class NativeFleet(FakeFleet):
    """A fake fleet of engines that serve at ``urls``; an engine is replaced by itself."""

    def __init__(self, urls: list[str], router: RouterProcess | None = None) -> None:
        super().__init__(len(urls), with_router=router is None)
        self.urls = urls
        self.process = router
        self.exports: dict[int, WeightsRef] = {}

    async def spawn(self, name: str, incarnation: int) -> FakeEngine:
        return FakeEngine(name, self.urls[int(name.partition("-")[2])], incarnation)

    async def router(self, run: RunRef) -> RouterHandle | None:
        if self.process is None:
            return await super().router(run)
        return RouterHandle(url=self.process.url, incarnation=0)

    def exporting(self, *exports: WeightsRef) -> None:
        """Let the trainer export these from now on."""
        self.exports |= {weights.version: weights for weights in exports}

        async def export_weights(token: FenceToken, version: int) -> WeightsRef:
            return self.exports[version]

        self.live_trainer.export_weights = export_weights  # type: ignore[method-assign]

    def site(self) -> Site:
        """Real clients of the engines, and of the router where it is a process."""
        router = self.router_client if self.process is None else RouterClient
        return Site(fleet=self, tracker=ListTracker(), engine=EngineClient, router=router)


async def prepared(fleet: NativeFleet, document: dict[str, Any]) -> PublicationBench:
    return await publication_bench(fleet, document, fleet.site())
