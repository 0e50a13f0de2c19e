"""A prepared fully async run on a real root, with fake engines and a fake router, to publish to."""

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.testing import ActivityEnvironment

from activities.publish import publish
from activities.site import Site, spec_of
from activities.storage import layout
from activities.storage.store import Store
from activities.tokens import token_of
from configs.load import resolve_document
from configs.run import RunSpec
from models.ids import FenceToken, RunRef
from models.publication import PublicationReport, PublishRequest
from models.run import PrepareRequest
from tests.support.fake_fleet import FakeFleet, site_of

TOKEN = FenceToken(epoch=1, update=0, attempt=1)


@dataclasses.dataclass
class PublicationBench:
    """Publishes to ``fleet`` as the worker's activity does."""

    fleet: FakeFleet
    site: Site
    run: RunRef
    activity: ActivityEnvironment

    @property
    def spec(self) -> RunSpec:
        return spec_of(self.run)

    @property
    def log(self) -> list[str]:
        return self.fleet.log

    def token(self, version: int, attempt: int = 1) -> FenceToken:
        return token_of(self.request(version), attempt)

    def request(self, version: int) -> PublishRequest:
        return PublishRequest(run=self.run, epoch=1, update=version, version=version)

    async def publish(self, version: int, attempt: int = 1) -> PublicationReport:
        self.fleet.live_trainer.policy_version = version
        report: PublicationReport = await self.activity.run(
            publish, self.site, self.request(version), self.token(version, attempt)
        )
        return report

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of a JSONL file of the run."""
        return Store(self.run.root).read_jsonl(name).rows


def async_document(root: Path, mode: str = "refresh", **inference: Any) -> dict[str, Any]:
    """A run file of a fully async run with two engines."""
    return {
        "schema_version": 1,
        "name": "x",
        "model": {"source": "tiny", "tiny": {}},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 64}]},
        "output": {"root": str(root)},
        "core": {"publication_mode": mode},
        "async": {"fully_async": True},
        "inference": {"num_engines": 2, "update_timeout_s": 20.0, **inference},
    }


async def publication_bench(
    fleet: FakeFleet, document: dict[str, Any], site: Site | None = None
) -> PublicationBench:
    """Write the run file and prepare the fleet."""
    loaded = resolve_document(document, origin="test")
    root = document["output"]["root"]
    Store(root).write_json(layout.RESOLVED_CONFIG, loaded.document)
    run = RunRef(run_id="train/x", root=root, spec_sha256=loaded.sha256)
    await fleet.prepare(TOKEN, PrepareRequest(run=run, epoch=1))
    activity = ActivityEnvironment()
    activity.info = dataclasses.replace(activity.info, heartbeat_timeout=timedelta(seconds=1))
    return PublicationBench(fleet, site or site_of(fleet), run, activity)
