"""The compiler cache: hits, misses, damage, storage that is full or hangs, several publishers."""

import json
import os
import queue
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from activities.storage.store import Store
from models.errors import ConfigurationError, ServiceUnreachable
from models.ids import RunRef
from workers.actors.order import ActorOrder
from workers.actors.trainer import TrainerActor
from workers.compiler_cache import __main__ as process
from workers.compiler_cache import place as place_module
from workers.compiler_cache import transfer
from workers.compiler_cache.archive import DamagedArchive, shared_files, unpack
from workers.compiler_cache.place import SETTLED_S, Limits, publish, restore
from workers.compiler_cache.transfer import CompilerCache, Terms, cache_variables, compiler_cache

LIMIT = 1 << 20
KIND = "trainer-cpu"


def kernels(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / "triton" / name / "kernel.cubin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> set[str]:
    return {str(path) for path in shared_files(folder)}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@pytest.fixture
def place(tmp_path: Path) -> Store:
    return Store(tmp_path / "shared")


def put(
    place: Store,
    folder: Path,
    scratch: Path,
    max_bytes: int = LIMIT,
    kind: str = KIND,
    total: int = LIMIT,
) -> dict[str, Any]:
    return publish(place, kind, folder, scratch, Limits(max_bytes, total))


def test_what_one_run_compiled_the_next_one_finds(place: Store, tmp_path: Path) -> None:
    first, second = kernels(tmp_path / "a", x="one", y="two"), tmp_path / "b"
    assert restore(place, KIND, second, tmp_path)["outcome"] == "miss"
    assert put(place, first, tmp_path)["outcome"] == "published"

    assert restore(place, KIND, second, tmp_path) | {"bytes": 0} == {
        "outcome": "hit",
        "files": 2,
        "bytes": 0,
    }
    assert (second / "triton" / "y" / "kernel.cubin").read_text() == "two"
    assert put(place, second, tmp_path)["outcome"] == "unchanged"
    assert restore(place, "engine-cpu", tmp_path / "c", tmp_path)["outcome"] == "miss"


def test_publishers_add_to_what_is_there_and_old_archives_go(place: Store, tmp_path: Path) -> None:
    place.write_bytes(f"{KIND}/{time.time_ns() - 7200 * 10**9:020d}-old.tar.gz", b"")
    for name in "wxyz":
        put(place, kernels(tmp_path / name, **{name: name}), tmp_path)
    restore(place, KIND, tmp_path / "all", tmp_path)
    assert names(tmp_path / "all") == {f"triton/{name}/kernel.cubin" for name in "wxyz"}
    archives = [name for name in place.list(KIND) if name.endswith(".tar.gz")]
    assert len(archives) == 4
    assert not any("old" in name for name in archives)


def test_publishers_at_once_leave_a_whole_cache(place: Store, tmp_path: Path) -> None:
    folders = [kernels(tmp_path / f"p{n}", **{f"k{n}": "x" * 1000}) for n in range(6)]
    results: list[dict[str, Any]] = []

    def work(folder: Path) -> None:
        results.append(put(place, folder, tmp_path))

    threads = [threading.Thread(target=work, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert len(results) == 6
    assert restore(place, KIND, tmp_path / "after", tmp_path)["outcome"] == "hit"


def current_archive(place: Store) -> Path:
    pointer = place.read_json(f"{KIND}/CURRENT.json")
    return place.local_path(f"{KIND}/{pointer['archive']}")


@pytest.mark.parametrize("damage", ["cut", "flipped", "pointer", "gone", "leads elsewhere"])
def test_damage_is_a_miss_and_is_replaced(place: Store, tmp_path: Path, damage: str) -> None:
    folder = kernels(tmp_path / "a", x="one")
    put(place, folder, tmp_path)
    archive = current_archive(place)
    content = archive.read_bytes()
    if damage == "cut":
        archive.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        archive.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "gone":
        archive.unlink()
    else:
        text = "{" if damage == "pointer" else '{"archive": "../../x.tar.gz", "sha256": ""}'
        place.write_bytes(f"{KIND}/CURRENT.json", text.encode())

    with pytest.raises((DamagedArchive, FileNotFoundError)):
        restore(place, KIND, tmp_path / "b", tmp_path)
    assert not (tmp_path / "b").exists()
    assert put(place, kernels(folder, y="two"), tmp_path)["outcome"] == "published"
    assert restore(place, KIND, tmp_path / "c", tmp_path)["files"] == 2


@pytest.mark.parametrize(
    "member",
    ["../out", "/abs/out", "a/../../out", "fxgraph/x", "a/cached.pkl", "link", ".hidden"],
)
def test_members_that_no_cache_holds_are_refused(tmp_path: Path, member: str) -> None:
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as members:
        info = tarfile.TarInfo(member)
        if member == "link":
            info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            members.addfile(info)
        else:
            info.size = 1
            members.addfile(info, BytesIO(b"x"))
    with pytest.raises(DamagedArchive):
        unpack(archive, tmp_path / "inside")
    assert not (tmp_path / "out").exists()


def test_pickles_links_and_unfinished_files_stay_at_home(tmp_path: Path) -> None:
    folder = kernels(tmp_path / "a", x="one")
    for name in ("inductor/fxgraph/ab/cd", "inductor/x.pkl", "triton/tmp.pid", "triton/x.lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "triton" / "link").symlink_to("/etc/hostname")
    assert names(folder) == {"triton/x/kernel.cubin"}


def test_a_cache_above_its_limit_is_not_published(place: Store, tmp_path: Path) -> None:
    with pytest.raises(DamagedArchive, match="more than 10 bytes"):
        put(place, kernels(tmp_path / "a", x="x" * 11), tmp_path, max_bytes=10)
    assert place.list(KIND) == []


def test_a_third_publisher_of_a_host_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.tempfile, "gettempdir", lambda: str(tmp_path))
    with process._slot() as first, process._slot() as second, process._slot() as third:
        assert (first, second, third) == (True, True, False)
    with process._slot() as again:
        assert again


def test_a_full_disk_is_told_and_nothing_else(place: Store, tmp_path: Path) -> None:
    put(place, kernels(tmp_path / "a", x="x" * 100_000), tmp_path)
    command = [sys.executable, "-m", "workers.compiler_cache", "restore", "--place", place.root]
    command += ["--kind", KIND, "--folder", str(tmp_path / "b" / "cache"), "--max-bytes", "9"]
    command += ["--max-total-bytes", "9"]
    # No file above 8 KiB: what a full disk looks like to a writer.
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 8; trap "" XFSZ; exec "$@"', "x", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout)["outcome"] == "failed"


def test_storage_that_hangs_costs_the_bound_and_no_more(tmp_path: Path) -> None:
    place = tmp_path / "shared"
    cache = CompilerCache(str(place), tmp_path / "scratch" / "cache", "trainer-cpu")
    (place / cache._kind).mkdir(parents=True)
    os.mkfifo(place / cache._kind / "CURRENT.json")  # whoever opens it waits for a writer

    started = time.monotonic()
    result = cache.restore(timeout_s=2.0)

    assert time.monotonic() - started < 15
    assert result["outcome"] == "failed"
    assert result["reason"] == "no end within 2 s"


def test_a_cache_is_published_once_an_interval_and_the_next_actor_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    place, told = str(tmp_path / "shared"), queue.Queue[dict[str, Any]]()
    monkeypatch.setattr(transfer.time, "monotonic", lambda: now[0])
    first = CompilerCache(place, tmp_path / "s1" / "cache", "trainer-cpu", Terms(interval_s=600))
    assert first.restore()["outcome"] == "miss"
    kernels(tmp_path / "s1" / "cache", k="one")

    now[0] = 1599.0
    first.publish_if_due(told.put)  # the interval is not over
    now[0] = 1600.0
    first.publish_if_due(told.put)
    first.publish_if_due(told.put)  # it has begun again
    assert told.get(timeout=30)["outcome"] == "published"
    now[0] = 2200.0
    first.publish_if_due(told.put)
    assert told.get(timeout=30)["outcome"] == "unchanged"
    assert told.empty()

    second = CompilerCache(place, tmp_path / "s2" / "cache", "trainer-cpu")
    assert second.restore()["outcome"] == "hit"
    assert (tmp_path / "s2" / "cache" / "triton" / "k" / "kernel.cubin").read_text() == "one"


def test_a_server_publishes_regularly_while_its_process_lives(tmp_path: Path) -> None:
    place, folder = tmp_path / "shared", kernels(tmp_path / "s" / "cache", k="one")
    cache = CompilerCache(str(place), folder, "engine-cpu", Terms(interval_s=0.2))
    current, over = place / cache._kind / "CURRENT.json", threading.Event()
    cache.publish_regularly(over)
    wait_for(current.exists)
    kernels(folder, l="two")
    wait_for(lambda: "triton/l/kernel.cubin" in current.read_text())
    over.set()


def test_a_publication_waits_for_the_one_before_it_and_no_longer_than_it_may(
    tmp_path: Path,
) -> None:
    place = tmp_path / "shared"
    folder = kernels(tmp_path / "scratch" / "cache", k="one")
    cache = CompilerCache(str(place), folder, "trainer-cpu")
    (place / cache._kind).mkdir(parents=True)
    os.mkfifo(place / cache._kind / "CURRENT.json")
    before = threading.Thread(target=cache.publish, args=(3.0,))
    before.start()
    wait_for(cache._publishing.locked)

    result = cache.publish(timeout_s=0.5)

    assert (result["outcome"], result["seconds"]) == ("failed", 0.5)
    assert "one before it" in result["reason"]
    before.join(30)
    assert not before.is_alive()


def test_archives_of_all_kinds_together_stay_below_the_limit(
    place: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go, with the pointer to them; those of the last hour and the newest stay."""
    hours = [0]
    monkeypatch.setattr(
        place_module.time, "time_ns", lambda: 10**18 + int(hours[0] * (SETTLED_S + 1) * 1e9)
    )
    for name in ("old", "older"):
        hours[0] += 1
        put(place, kernels(tmp_path / name, x=name), tmp_path, kind=name)
    hours[0] += 1
    size = place.size(f"old/{place.list('old')[0]}")
    put(place, kernels(tmp_path / "x", x="new"), tmp_path, kind="new", total=2 * size + 100)

    assert place.list("old") == []
    assert [len(place.list(kind)) for kind in ("older", "new")] == [2, 2]
    put(place, kernels(tmp_path / "y", y="newer"), tmp_path, kind="newer", total=1)
    assert place.list("older") == []
    assert [len(place.list(kind)) for kind in ("new", "newer")] == [2, 2]  # not an hour old
    assert restore(place, "old", tmp_path / "again", tmp_path)["outcome"] == "miss"


def test_it_is_off_unless_a_place_is_named(tmp_path: Path) -> None:
    assert cache_variables("trainer", tmp_path, {}) == {}
    assert compiler_cache("trainer", {}) is None

    told = {"PERDURE_COMPILER_CACHE": "/shared"}
    variables = cache_variables("trainer", tmp_path, told)
    assert variables["TRITON_CACHE_DIR"] == str(tmp_path / "compiler-trainer" / "triton")
    assert compiler_cache("trainer", told | variables) is not None
    for name in ("LIMIT_MIB", "TOTAL_MIB", "INTERVAL_S"):
        wrong = {f"PERDURE_COMPILER_CACHE_{name}": "0"}
        with pytest.raises(ConfigurationError, match=f"{name}='0' is no whole number of"):
            compiler_cache("trainer", told | variables | wrong)


def test_a_trainer_restores_before_it_loads_and_publishes_after_finished_updates_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, work = Store(tmp_path / "root"), []

    class Cache:
        def restore(self) -> dict[str, Any]:
            work.append("restore")
            return {"work": "restore", "outcome": "miss"}

        def publish_if_due(self, told: Any) -> None:
            work.append("publish")
            told({"work": "publish", "outcome": "published"})

    class Guarded:
        def optimize(self, _token: Any, update: int, _collection: Any) -> str:
            work.append("optimize")
            if update:
                raise ServiceUnreachable("the root is away")
            return "report"

    actor = TrainerActor.__new__(TrainerActor)
    run = RunRef(run_id="train/x", root=str(tmp_path / "root"), spec_sha256="s")
    actor._order = ActorOrder(run=run, role="trainer", scratch=str(tmp_path))
    actor._cache, actor._started, actor._broken, actor._guarded = Cache(), None, False, Guarded()  # type: ignore[assignment]
    monkeypatch.setattr(actor, "_set_up", lambda *_: work.append("set up"))
    monkeypatch.setattr(actor, "facts", lambda: None)

    actor.start(1, None, None)
    actor.start(1, None, None)
    actor.optimize(None, 0, None)  # type: ignore[arg-type]
    with pytest.raises(ServiceUnreachable):
        actor.optimize(None, 1, None)  # type: ignore[arg-type]

    assert work == ["restore", "set up", "optimize", "publish", "optimize"]
    rows = store.read_jsonl("checkpoints/compiler_cache.jsonl").rows
    assert [row["work"] for row in rows] == ["restore", "publish"]
