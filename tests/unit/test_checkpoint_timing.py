"""The timing row of a checkpoint tells when the trainer wrote."""

import dataclasses
from datetime import timedelta
from pathlib import Path

from temporalio.testing import ActivityEnvironment

from activities.checkpoint import checkpoint
from activities.storage import layout
from activities.storage.store import Store
from configs.load import resolve_document
from models.checkpoint import CheckpointRequest
from models.ids import FenceToken, RunRef
from models.run import PrepareRequest
from tests.support.fake_fleet import FakeFleet, site_of

TOKEN = FenceToken(epoch=1, update=0, attempt=1)


async def test_the_write_of_the_trainer_lies_inside_its_checkpoint(tmp_path: Path) -> None:
    document = {
        "schema_version": 1,
        "name": "x",
        "model": {"source": "tiny", "tiny": {}},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 64}]},
        "output": {"root": str(tmp_path)},
    }
    loaded = resolve_document(document, origin="test")
    store = Store(tmp_path)
    store.write_json(layout.RESOLVED_CONFIG, loaded.document)
    run = RunRef(run_id="train/x", root=str(tmp_path), spec_sha256=loaded.sha256)
    fleet = FakeFleet(num_engines=1)
    await fleet.prepare(TOKEN, PrepareRequest(run=run, epoch=1))
    activity = ActivityEnvironment()
    activity.info = dataclasses.replace(activity.info, heartbeat_timeout=timedelta(seconds=1))
    request = CheckpointRequest(run=run, epoch=1, update=0, policy_version=1)
    for attempt in (1, 2):
        token = TOKEN.model_copy(update={"attempt": attempt})
        await activity.run(checkpoint, site_of(fleet), request, token)
    written, repeated = store.read_jsonl(layout.DRIVER_TIMING).rows
    write = written["details"]["trainer_write"]
    assert written["started_unix"] <= write["started_unix"]
    assert 0 <= write["seconds"] <= written["seconds"]
    # the second attempt finds the checkpoint: nobody wrote
    assert (repeated["passed"], "details" in repeated) == (True, False)
