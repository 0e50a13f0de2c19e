"""The store on S3: a server of the protocol on loopback, over real HTTP."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from activities.storage import lease, objects
from activities.storage.lease import Owner, claim_epoch, current_epoch
from activities.storage.objects import ObjectStore
from activities.storage.patterns import files_below, find_files
from activities.storage.store import Store, free_bytes
from models.errors import ConfigurationError, ServiceUnreachable
from workers.local_stack.ports import free_port

s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")
server = pytest.importorskip("moto.server", reason="moto[server] is not installed")

BUCKET = "perdure"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """URL of a bucket; endpoint and keys come from the environment, as a worker's do."""
    boto3 = pytest.importorskip("boto3")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    running.stop()


@pytest.fixture
def store(bucket: str) -> Store:
    return Store(f"{bucket}/{uuid.uuid4().hex}")


def test_files_come_back_and_listings_are_fresh(store: Store) -> None:
    assert not store.exists("a")
    assert store.list("a") == []
    store.write_bytes("a/one.bin", b"1")
    store.write_json("a/two.json", {"b": 2})
    store.write_bytes("a/one.bin", b"12")
    assert (store.list("a"), store.size("a/one.bin")) == (["one.bin", "two.json"], 2)
    assert store.read_json("a/two.json") == {"b": 2}
    with pytest.raises(FileNotFoundError):
        store.read_bytes("a/three")
    assert not store.is_local
    assert free_bytes(store.root) is None


def test_one_of_many_creates_exclusively(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: store.create_exclusive("one", b"%d" % n), range(8)))
    assert sum(made) == 1
    assert store.read_bytes("one") == b"%d" % made.index(True)


def test_rows_are_objects_in_order(store: Store) -> None:
    for number in range(5):
        store.append_jsonl("rows.jsonl", {"number": number})
    assert store.read_jsonl("rows.jsonl") == ([{"number": n} for n in range(5)], 0)
    assert store.last_jsonl("rows.jsonl") == {"number": 4}


def test_rows_of_a_later_process_come_later_whatever_its_clock_says(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append_jsonl("rows.jsonl", {"life": 1})
    monkeypatch.setattr("activities.storage.store._NEWEST", {})  # another process
    monkeypatch.setattr("time.time_ns", lambda: 5)  # of a host whose clock is behind
    store.append_jsonl("rows.jsonl", {"life": 2})
    store.append_jsonl("rows.jsonl", {"life": 3})
    assert [row["life"] for row in store.read_jsonl("rows.jsonl").rows] == [1, 2, 3]
    assert store.last_jsonl("rows.jsonl") == {"life": 3}


def test_a_missing_bucket_and_a_silent_server_are_told_apart(
    bucket: str,
) -> None:
    with pytest.raises(ConfigurationError, match="there is no bucket 'nowhere'"):
        Store("s3://nowhere/run").write_bytes("a", b"1")
    with pytest.raises(ConfigurationError, match="there is no bucket 'nowhere'"):
        Store("s3://nowhere/run").create_exclusive("a", b"1")
    url = f"http://127.0.0.1:{free_port()}"
    silent = s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True)
    silent.retries = 1
    with pytest.raises(ServiceUnreachable, match="does not answer"):
        ObjectStore(silent).read("bucket/a")


class Unconditional(MemoryFileSystem):
    """A store that takes no notice of conditions."""

    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "create", **_: object) -> None:
        super().pipe_file(path, value, mode="overwrite")


def test_a_store_that_ignores_conditions_owns_no_root() -> None:
    name = f"careless-{uuid.uuid4().hex}"
    with pytest.raises(ConfigurationError, match="ignores If-None-Match"):
        ObjectStore(Unconditional()).create(f"{name}/lease/epoch", b"1")


def test_a_bucket_is_proved_once(store: Store) -> None:
    assert store.create_exclusive("a", b"1")
    assert BUCKET in objects._PROVED
    assert not store.create_exclusive("a", b"2")
    assert store.read_bytes("a") == b"1"


def test_a_folder_moves_and_goes(store: Store) -> None:
    store.write_bytes("from/a", b"a")
    store.write_bytes("from/deep/b", b"b")
    store.rename("from", "to")
    assert store.list("from") == []
    assert (store.read_bytes("to/a"), store.read_bytes("to/deep/b")) == (b"a", b"b")
    store.rename("to/a", "to/c")
    assert store.list("to") == ["c", "deep"]
    with pytest.raises(FileNotFoundError):
        store.rename("nothing", "more")
    store.remove_tree("to")
    assert store.list("to") == []


def test_epochs_of_a_root_are_taken_once(store: Store) -> None:
    owner = Owner(
        cluster_id="c-1", namespace="default", run_id="train/a", workflow_run_id="w-1",
        host="alpha", pid=41, address="127.0.0.1:7233",
    )  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        epochs = list(pool.map(lambda _: claim_epoch(store, owner), range(8)))
    assert sorted(epochs) == list(range(1, 9))
    lease.revoke_epoch(store, 8)
    assert (current_epoch(store), lease.is_revoked(store, 8)) == (8, True)


def test_rows_are_set_aside_together(store: Store) -> None:
    for number in range(8):
        store.append_jsonl("rows.jsonl", {"n": number})
    store.set_rows_aside("rows.jsonl", lambda row: int(row[5:6]) > 4, "old.jsonl")
    assert [row["n"] for row in store.read_jsonl("rows.jsonl").rows] == [0, 1, 2, 3, 4]
    assert [row["n"] for row in store.read_jsonl("old.jsonl").rows] == [5, 6, 7]
    store.set_rows_aside("rows.jsonl", lambda row: int(row[5:6]) > 4, "old.jsonl")
    assert len(store.list("old.jsonl.parts")) == 1
    store.append_rows("rows.jsonl", [{"n": 6}, {"n": 3}, {"n": 7}])
    store.set_rows_aside("rows.jsonl", lambda row: int(row[5:6]) > 4, "later.jsonl")
    assert [row["n"] for row in store.read_jsonl("rows.jsonl").rows] == [0, 1, 2, 3, 4, 3]
    assert [row["n"] for row in store.read_jsonl("later.jsonl").rows] == [6, 7]


def test_patterns_tell_what_fails(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = f"{bucket}/{uuid.uuid4().hex}/*.jsonl"
    assert find_files(pattern) == []
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setattr(s3fs.S3FileSystem, "cachable", False)
        with pytest.raises(ConfigurationError, match="AWS_ACCESS_KEY_ID"):
            find_files(pattern)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "cachable", False)
    with pytest.raises(ServiceUnreachable, match="does not answer"):
        find_files(pattern)
    with pytest.raises(ServiceUnreachable, match="does not answer"):
        files_below(f"{bucket}/export")
