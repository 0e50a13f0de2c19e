"""``claim``, ``record``, ``revoke`` on a real folder."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities import lifecycle
from activities.multiplier import infra_timeout_multiplier
from activities.server import ServerFacts
from activities.site import spec_of
from activities.storage import layout
from activities.storage.lease import current_epoch, is_revoked
from activities.storage.store import Store
from configs.load import document_sha256, resolve_document
from models.errors import ConfigurationError, OwnershipError, StaleFence, StorageFull
from models.ids import FenceToken, RunRef
from models.run import (
    ClaimResult,
    RecordRequest,
    RevokeRequest,
    RunProgress,
    RunRequest,
    RunState,
)

SERVER = ServerFacts("default", "cluster-a", "127.0.0.1:7233", search_attributes=True)


class Desk:
    """Claims of one run file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store(root)
        self.document: dict[str, Any] = {
            "schema_version": 1,
            "name": "x",
            "model": {"source": "tiny", "tiny": {}},
            "data": {"tasks": [{"task": "reverse_word", "train_count": 64}]},
            "output": {"root": str(root)},
        }

    async def claim(
        self,
        request: RunRequest | None = None,
        *,
        run: str = "r1",
        server: ServerFacts = SERVER,
        workflow_id: str = "train/x",
        **sections: dict[str, Any],
    ) -> ClaimResult:
        document = dict(self.document)
        for name, values in sections.items():
            document[name] = {**document.get(name, {}), **values}
        request = request or RunRequest(config=resolve_document(document, origin="t").document)
        activity = ActivityEnvironment()
        activity.info = dataclasses.replace(
            activity.info, workflow_id=workflow_id, workflow_run_id=run
        )
        return await activity.run(lifecycle.claim, request, server)

    async def record(self, progress: RunProgress) -> None:
        await ActivityEnvironment().run(lifecycle.record, RecordRequest(progress=progress))

    def state(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads((self.root / "workflow.json").read_text())
        return answer


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "root")


async def test_a_first_claim_writes_what_a_reader_needs(desk: Desk) -> None:
    result = await desk.claim(launch={"fleet": "h200"})
    assert (result.epoch, result.attempt, result.checkpoint) == (1, 0, None)
    assert result.run.run_id == "train/x"
    assert result.fleet_queue == "perdure-fleet-h200"
    assert result.search_attributes
    state = desk.state()
    assert state["status"] == "preparing"
    assert state["spec_sha256"] == result.run.spec_sha256
    assert "Temporal" in state["about"]
    assert desk.store.read_json("run-spec.json")["launch"]["fleet"] == "h200"
    assert desk.store.read_json("plan.json")["run_id"] == "train/x"


async def test_a_repeated_claim_takes_a_new_epoch_and_no_attempt(desk: Desk) -> None:
    first = await desk.claim()
    again = await desk.claim()
    assert (first.epoch, again.epoch) == (1, 2)
    assert again.attempt == 0
    progress = RunProgress(run=again.run, epoch=2, attempt=again.attempt)
    request = RunRequest(config=desk.document, progress=progress)
    rebuilt = await desk.claim(request, run="r2")
    assert rebuilt.epoch == 3
    assert len(desk.store.read_json("attempts.json")) == 1


@pytest.mark.parametrize(
    ("limit", "starts"),
    [(2, [0, 1, 2]), (0, [0]), (-1, [0, 1, 2, 3])],
)
async def test_the_attempt_ledger(desk: Desk, limit: int, starts: list[int]) -> None:
    found = [
        (await desk.claim(run=f"r{start}", launch={"max_retries": limit})).attempt
        for start in starts
    ]
    assert found == starts
    if limit >= 0:
        with pytest.raises(ConfigurationError, match="max_retries"):
            await desk.claim(run="late", launch={"max_retries": limit})
        assert len(desk.store.read_json("attempts.json")) == len(starts)
        later = await desk.claim(run="raised", launch={"max_retries": limit + 1})
        assert later.attempt == len(starts)


async def test_a_changed_configuration_is_refused_with_both_digests(desk: Desk) -> None:
    await desk.claim()
    desk.store.write_json("rollouts/0000000.e1.json", {})
    before = resolve_document(desk.document, origin="t")
    changed = dict(desk.document, optimizer={"learning_rate": 0.25})
    after = resolve_document(changed, origin="t")
    with pytest.raises(ConfigurationError) as error:
        await desk.claim(run="r2", optimizer={"learning_rate": 0.25})
    assert before.identity in error.value.message
    assert after.identity in error.value.message
    assert "optimizer.learning_rate" in error.value.message
    assert desk.store.read_json("run-spec.json")["optimizer"]["learning_rate"] == 1e-6


async def test_a_run_file_that_an_older_version_recorded_means_the_defaults_of_new_keys(
    desk: Desk,
) -> None:
    await desk.claim()
    desk.store.write_json("rollouts/0000000.e1.json", {})
    recorded = desk.store.read_json("run-spec.json")
    del recorded["async"], recorded["core"]["publication_mode"], recorded["trainer"]["packing"]
    desk.store.write_json("run-spec.json", recorded)
    again = await desk.claim(run="r2")
    assert again.epoch == 2
    assert (
        desk.store.read_json("run-spec.json")
        == resolve_document(desk.document, origin="t").document
    )
    desk.store.write_json("run-spec.json", recorded)
    asynchronous = {"fully_async": True}
    with pytest.raises(ConfigurationError, match=r"\(different: async\.fully_async\)"):
        await desk.claim(run="r3", **{"async": asynchronous})


async def test_a_start_that_failed_while_preparing_may_be_corrected(desk: Desk) -> None:
    first = await desk.claim()
    failed = RunProgress(run=first.run, epoch=first.epoch, state=RunState.FAILED, error="no data")
    await desk.record(failed)
    again = await desk.claim(run="r2", optimizer={"learning_rate": 0.25})
    assert again.attempt == 1
    assert desk.store.read_json("run-spec.json")["optimizer"]["learning_rate"] == 0.25
    assert desk.state()["status"] == "preparing"


async def test_how_often_to_try_may_change(desk: Desk) -> None:
    await desk.claim()
    await desk.claim(run="r2", launch={"max_retries": 5})


async def test_another_run_and_another_server_are_refused_by_name(desk: Desk) -> None:
    await desk.claim()
    with pytest.raises(OwnershipError, match="train/x"):
        await desk.claim(run="r2", workflow_id="train/other")
    other = dataclasses.replace(SERVER, cluster_id="cluster-b")
    with pytest.raises(OwnershipError, match="cluster-a"):
        await desk.claim(run="r2", server=other)
    adopt = RunRequest(config=resolve_document(desk.document, origin="t").document, take_over=True)
    assert (await desk.claim(adopt, run="r2", server=other)).epoch == 2


async def test_a_complete_run_is_never_overwritten(desk: Desk) -> None:
    claimed = await desk.claim()
    await desk.record(RunProgress(run=claimed.run, epoch=1, state=RunState.COMPLETE))
    before = (desk.root / "workflow.json").read_bytes()
    with pytest.raises(ConfigurationError, match="complete run"):
        await desk.claim(run="r2")
    assert (desk.root / "workflow.json").read_bytes() == before


async def test_auto_resume_off_refuses_a_second_start(desk: Desk) -> None:
    await desk.claim()
    with pytest.raises(ConfigurationError, match="auto_resume"):
        await desk.claim(run="r2", launch={"auto_resume": False})


async def test_auto_resume_off_lets_a_claim_whose_answer_was_lost_be_repeated(desk: Desk) -> None:
    first = await desk.claim(launch={"auto_resume": False})
    again = await desk.claim(launch={"auto_resume": False})
    assert (again.attempt, again.epoch) == (first.attempt, first.epoch + 1)


async def test_only_the_first_claim_of_a_run_takes_over(desk: Desk) -> None:
    """Two runs that both adopted the root must not take it from one another for ever."""
    await desk.claim()
    config = resolve_document(desk.document, origin="t").document
    request = RunRequest(config=config, take_over=True)
    second = await desk.claim(request, workflow_id="train/y", run="r2")
    await desk.claim(request, workflow_id="train/z", run="r3")
    progress = RunProgress(run=second.run, epoch=second.epoch)
    later = request.model_copy(update={"progress": progress})
    with pytest.raises(OwnershipError, match="train/z"):
        await desk.claim(later, workflow_id="train/y", run="r2")


async def test_a_digest_that_does_not_fit_its_config_is_refused(desk: Desk) -> None:
    request = RunRequest(config=desk.document, config_sha256="0" * 64)
    with pytest.raises(ConfigurationError, match="render the run file again"):
        await desk.claim(request)
    assert not desk.root.exists()


async def test_a_run_that_an_older_version_started_goes_on(desk: Desk) -> None:
    """That version knew fewer keys, so its digest is of a document without them."""
    older = json.loads(json.dumps(resolve_document(desk.document, origin="t").document))
    del older["inference"]["drain_timeout_s"]
    digest = document_sha256(older)
    run = RunRef(run_id="train/x", root=str(desk.root), spec_sha256=digest)
    first = await desk.claim(RunRequest(config=older, config_sha256=digest))
    desk.store.write_json(layout.RESOLVED_CONFIG, older)
    progress = RunProgress(run=run, epoch=first.epoch)
    later = RunRequest(config=older, config_sha256=digest, progress=progress)
    result = await desk.claim(later)
    assert result.run == run
    assert spec_of(result.run).inference.drain_timeout_s == 180.0


async def test_a_full_device_refuses_the_start(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "free_bytes", lambda root: 3 << 20)
    with pytest.raises(StorageFull, match="3 MiB free"):
        await desk.claim()
    assert not desk.root.exists()


async def test_a_root_that_is_a_file_is_a_configuration_error(desk: Desk) -> None:
    desk.root.write_text("x")
    with pytest.raises(ConfigurationError, match="root"):
        await desk.claim()


async def test_a_claim_leaves_no_commit_of_an_older_epoch_behind_it(desk: Desk) -> None:
    claimed = await desk.claim()
    token = FenceToken(epoch=claimed.epoch, update=4, attempt=1)
    marker = f"{layout.checkpoint_folder(3, token)}/{layout.COMPLETE}"
    desk.store.write_bytes(f"{layout.checkpoint_folder(3, token)}/cursor.json", b"{}")
    again = await desk.claim()
    assert again.checkpoint is None
    assert not desk.store.create_exclusive(marker, b"late")


async def test_an_old_epoch_cannot_record_over_a_new_one(desk: Desk) -> None:
    claimed = await desk.claim()
    await desk.claim(run="r2")
    with pytest.raises(StaleFence, match="epoch 2 owns it"):
        await desk.record(RunProgress(run=claimed.run, epoch=1, state=RunState.FAILED))
    assert desk.state()["status"] == "preparing"


async def test_a_revoked_epoch_may_still_say_how_it_ended(desk: Desk) -> None:
    claimed = await desk.claim()
    await lifecycle.revoke(RevokeRequest(run=claimed.run, epoch=1), None)
    assert is_revoked(desk.store, 1)
    assert current_epoch(desk.store) == 1
    failed = RunProgress(
        run=claimed.run, epoch=1, state=RunState.FAILED, error="loss is NaN",
        error_type="NonFiniteLoss", finished_unix=2.0,
    )  # fmt: skip
    await desk.record(failed)
    state = desk.state()
    assert (state["status"], state["error"]) == ("failed", "NonFiniteLoss: loss is NaN")
    assert "result" not in state


@pytest.mark.parametrize(
    ("environment", "factor"),
    [
        ({}, 1.0),
        ({"PERDURE_INFRA_TIMEOUT_MULTIPLIER": "5"}, 5.0),
        ({"MILES_INFRA_TIMEOUT_MULTIPLIER": "2.5"}, 2.5),
        ({"PERDURE_INFRA_TIMEOUT_MULTIPLIER": "3", "MILES_INFRA_TIMEOUT_MULTIPLIER": "3"}, 3.0),
    ],
)
def test_the_infrastructure_multiplier(environment: dict[str, str], factor: float) -> None:
    assert infra_timeout_multiplier(environment) == factor


@pytest.mark.parametrize(
    "environment",
    [
        {"PERDURE_INFRA_TIMEOUT_MULTIPLIER": "0.5"},
        {"PERDURE_INFRA_TIMEOUT_MULTIPLIER": "nan"},
        {"PERDURE_INFRA_TIMEOUT_MULTIPLIER": "inf"},
        {"PERDURE_INFRA_TIMEOUT_MULTIPLIER": "fast"},
        {"PERDURE_INFRA_TIMEOUT_MULTIPLIER": "3", "MILES_INFRA_TIMEOUT_MULTIPLIER": "4"},
    ],
)
def test_a_wrong_multiplier_fails_loudly(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="INFRA_TIMEOUT_MULTIPLIER"):
        infra_timeout_multiplier(environment)
