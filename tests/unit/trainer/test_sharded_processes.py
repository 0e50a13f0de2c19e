"""The trainer actor and its other rank as real processes: no rank is ever left behind."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fleet_rig import tiny_document

from activities.rollout.collection_file import write_collection
from activities.storage import layout
from activities.storage.store import Store
from configs.load import resolve_document
from models.ids import RunRef
from models.ports import RankEvent
from models.rollout import CollectionCounts, RolloutCollection
from workers.actors.order import ActorOrder
from workers.trainers.weights import export_bases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

START_S = 150.0
CALL_S = 60.0
GONE_S = 15.0


class Leader:
    """The process of rank 0."""

    def __init__(self, folder: Path, make_groups: Any, model: Any, **trainer: Any) -> None:
        root = folder / "root"
        core = {"max_context_length": 64, "max_policy_lag": 8}
        document = tiny_document(root, "ranks", trainer={"num_processes": 2, **trainer}, core=core)
        document["training"] = {
            "rollout_batch_size": 2,
            "samples_per_prompt": 4,
            "num_rollouts": 4,
            "use_tis": True,
        }
        loaded = resolve_document(document, origin="test")
        self.store = Store(str(root))
        self.store.write_json(layout.RESOLVED_CONFIG, loaded.document)
        if model is not None:
            shutil.copytree(model, self.store.local_path(layout.PREPARED_MODEL))
        self.groups = make_groups
        run = RunRef(run_id="train/ranks", root=str(root), spec_sha256=loaded.sha256)
        order = ActorOrder(run=run, role="trainer", scratch=str(folder / "scratch"))
        script = Path(__file__).parents[2] / "support" / "rank_leader.py"
        self.log = folder / "leader.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), order.model_dump_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                process_group=0,
            )
        self.started = self.answer(START_S)
        self.ranks = [psutil.Process(pid) for pid in self.started.get("pids", [])]

    def collection(self, update: int) -> dict[str, Any]:
        uri = f"rollouts/{update}.parquet"
        sha256 = write_collection(self.store, uri, self.groups(update))
        counts = CollectionCounts(groups=2, samples=8, prompt_tokens=8, response_tokens=36)
        collection = RolloutCollection(
            update=update,
            epoch=1,
            uri=uri,
            sha256=sha256,
            counts=counts,
            reward_mean=0.5,
            min_version=0,
            max_version=0,
            seconds=1.0,
        )
        return collection.model_dump(mode="json")

    def call(self, **fields: Any) -> dict[str, Any]:
        self.send(**fields)
        return self.answer(CALL_S)

    def optimize(self, update: int) -> dict[str, Any]:
        return self.call(call="optimize", update=update, collection=self.collection(update))

    def send(self, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        stream = self.process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            assert selector.select(timeout_s), "no answer"
        line = stream.readline()
        assert line, self.log.read_text()
        return dict(json.loads(line))

    def rank_events(self) -> list[RankEvent]:
        rows, _ = self.store.read_jsonl(layout.TRAINER_RANKS)
        return [RankEvent.model_validate(row) for row in rows]

    def end(self) -> None:
        for process in (self.process, *self.ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(GONE_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, GONE_S)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def lead(tmp_path, make_groups, model_dir):
    leaders: list[Leader] = []

    def start(model=model_dir, **trainer: Any) -> Leader:
        leaders.append(Leader(tmp_path, make_groups, model, **trainer))
        return leaders[-1]

    yield start
    for leader in leaders:
        leader.end()
        for base in export_bases(leader.store.root):
            shutil.rmtree(base, ignore_errors=True)


def test_two_processes_train_export_and_end(lead):
    leader = lead()
    assert len(leader.ranks) == 1
    for update in range(2):
        assert leader.optimize(update)["policy_version"] == update + 1
    assert (
        Path(leader.call(call="export", update=1, version=2)["path"]) / "model.safetensors"
    ).exists()
    for rank in range(2):
        rows, _ = leader.store.read_jsonl(layout.training_contract(rank))
        assert [row["step"] for row in rows if row["event"] == "optimizer"] == [1, 2]
    # refused before any rank is told
    again = leader.call(call="optimize", update=2, collection=leader.collection(4))
    assert again["error"] == "ContractViolation"
    assert leader.optimize(2)["policy_version"] == 3
    # refused by every rank while it reads the collection: they stay in step
    damaged = leader.collection(3) | {"sha256": "0" * 64}
    refused = leader.call(call="optimize", update=3, collection=damaged)
    assert refused["error"] == "DigestMismatch"
    assert "rank 0: DigestMismatch: " in refused["message"]
    assert "rank 1: DigestMismatch: " in refused["message"]
    assert leader.optimize(3)["policy_version"] == 4
    assert leader.call(call="close") == {"closed": True}
    assert gone(leader.ranks)
    (began,) = leader.rank_events()  # an end that was asked for is no loss
    assert (began.incarnation, began.rank, began.pid) == (0, 1, leader.ranks[0].pid)
    assert (began.host, began.ended) == (socket.gethostname(), "")


def test_a_killed_rank_ends_the_trainer(lead):
    leader = lead()
    leader.optimize(0)
    leader.ranks[0].kill()
    assert leader.process.wait(GONE_S) == 1
    assert gone(leader.ranks)
    _, ended = leader.rank_events()
    assert (ended.incarnation, ended.rank) == (0, 1)
    assert ended.ended.startswith("rank 1 of 2 of the trainer was ended by SIGKILL; its log is ")


def test_a_rank_that_is_killed_at_work_is_named_before_the_trainer_ends(lead):
    leader = lead()
    leader.ranks[0].suspend()  # so that the update cannot end before the kill
    leader.send(call="optimize", update=0, collection=leader.collection(0))
    leader.ranks[0].kill()
    answer = leader.answer(GONE_S)
    assert answer["error"] == "TrainerLost"
    assert "rank 1 of 2 of the trainer was ended by SIGKILL" in answer["message"]
    assert leader.process.wait(GONE_S) == 1


def test_a_rank_that_hangs_is_given_up_in_time(lead):
    leader = lead(collective_timeout_s=15.0)
    leader.optimize(0)
    leader.ranks[0].suspend()
    began = time.monotonic()
    answer = leader.optimize(1)
    assert answer["error"] == "TrainerLost"
    assert time.monotonic() - began < 45
    assert gone(leader.ranks)
    assert leader.call(call="facts") == {"serving": False}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_their_trainer(lead, number):
    leader = lead()
    leader.process.send_signal(number)
    leader.process.wait(GONE_S)
    assert gone(leader.ranks)


def test_a_model_that_no_rank_can_load_is_refused_and_leaves_nothing(lead, tmp_path):
    (tmp_path / "empty").mkdir()
    before = set(psutil.Process().children(recursive=True))
    leader = lead(tmp_path / "empty")
    assert leader.started["error"] == "ConfigurationError"
    assert "rank 1: ConfigurationError: " in leader.started["message"]
    leader.process.wait(GONE_S)
    assert gone([p for p in psutil.Process().children(recursive=True) if p not in before])
