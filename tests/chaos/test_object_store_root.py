"""A run whose output root is a bucket: trained, killed, resumed, exported, proved complete."""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_harness import Job, Stack, account, write_config
from s3_server import BUCKET, s3_bucket
from temporalio.client import WorkflowExecutionStatus

from activities.storage import layout
from activities.storage.commit import newest_checkpoint, verify_checkpoint
from activities.storage.host_cache import CACHE_DIR
from activities.storage.store import Store

pytest.importorskip("s3fs", reason="the extra s3 is not installed")
pytest.importorskip("moto.server", reason="moto and flask are not installed")

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.workflow, pytest.mark.timeout(600)]

UPDATES = 6
TINY = """[model.tiny]
hidden_size = 32
num_layers = 1
num_heads = 2
num_kv_heads = 1
warmup_accuracy = 0.0
"""
ROOT = f"s3://{BUCKET}/runs/bucket"


class BucketJob(Job):
    """The harness's run with its files in a bucket."""

    store: Store

    async def until_updates(self, count: int, timeout_s: float = 300) -> None:
        async with asyncio.timeout(timeout_s):
            while len(await asyncio.to_thread(self.finished_updates)) < count:
                await asyncio.sleep(0.2)

    def finished_updates(self) -> list[dict[str, object]]:
        return self.store.read_jsonl(layout.UPDATES).rows

    def actor_pids(self, role: str) -> list[int]:
        rows: list[dict[str, Any]] = self.store.read_json(layout.FLEET_JSON)
        return [int(row["pid"]) for row in rows if row["role"] == role]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose processes all have the keys of the bucket and a cache of their own."""
    cache = tmp_path_factory.mktemp("cache")
    with (
        s3_bucket() as variables,
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="perdure-bucket-", dir="/tmp") as folder,
    ):
        for name, value in {**variables, CACHE_DIR: str(cache)}.items():
            patch.setenv(name, value)
        stack = Stack(Path(folder))
        stack.up()
        yield stack
        stack.down()


async def test_killed_resumed_exported_and_proved(stack: Stack, tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "run.toml",
        "bucket",
        tmp_path,
        Path("tiny"),
        model__source="tiny",
        output__root=ROOT,
        output__export_hf=True,
        training__num_rollouts=UPDATES,
        training__rollout_batch_size=4,
        training__samples_per_prompt=4,
        training__global_batch_size=16,
        training__save_interval=2,
        optimizer__lr_warmup_steps=2,
        evaluation__interval=UPDATES,
    )
    config.write_text(f"{config.read_text()}{TINY}")
    job = BucketJob(stack, config, "bucket", tmp_path)
    store = job.store = Store(ROOT)
    await asyncio.to_thread(job.start)
    await job.until_updates(3)
    print(await job.kill_and_measure("trainer", "update"))
    assert await job.until_closed() == WorkflowExecutionStatus.COMPLETED

    books = account(ROOT)
    assert (books.missing, books.doubled) == (0, 0)
    assert books.updates == list(range(UPDATES))
    checkpoint = newest_checkpoint(store)
    assert checkpoint is not None
    assert checkpoint.update == UPDATES - 1
    verify_checkpoint(store, checkpoint)

    shown = await asyncio.to_thread(stack.perdure, "status", ROOT, "--verify", "--json")
    report = json.loads(shown.stdout)["verification"]
    flaws = [flaw for check in report["checks"] for flaw in check["flaws"]]
    assert (shown.returncode, flaws, report["complete"]) == (0, [], True)
    assert "export loads" in {check["name"] for check in report["checks"]}

    cache = Path(os.environ[CACHE_DIR])
    assert list((cache / "transfer").iterdir()) == [], "nothing is left of transfers"
    assert len(list((cache / "folders").glob("*.proved"))) == 2, "the model and the export, once"
