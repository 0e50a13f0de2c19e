"""Parts of a checkpoint: who writes which rows, who reads them, and what is refused."""

import json

import numpy
import pytest
import torch
from part_cases import (
    live_without_pickle,
    load_odd,
    no_pickle,
    raw_parts,
    read_rows,
    save_odd,
    write_rows,
)
from rank_cases import Job, live
from safetensors.torch import load_file, save_file

from activities.storage import commit, layout
from activities.storage.store import Store
from models.checkpoint import PolicyClock
from models.errors import ContractViolation, DigestMismatch
from models.ids import FenceToken, RunRef
from models.prompt import DataState
from workers.trainers.ranks import SingleRank

pytestmark = pytest.mark.timeout(200)  # processes start for the first test

START = PolicyClock(completed_steps=0, published_step=-1, next_rollout_id=0)


def on(two_ranks, count, function, *args):
    return two_ranks.run(function, *args) if count == 2 else [function(SingleRank(), *args)]


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 2), (1, 1)])
def test_what_was_in_memory_is_in_memory_again(two_ranks, tmp_path, writers, readers):
    """Uneven rows, fewer rows than ranks, numbers, buffers that every rank has, a tied weight."""
    saved = on(two_ranks, writers, save_odd, tmp_path / "saved")[0]
    assert {name for name in saved if "/" not in name} == {
        *("embedding.weight", "narrow.weight", "narrow.bias", "scale", "count")
    }
    for loaded in on(two_ranks, readers, load_odd, tmp_path / "saved"):
        assert loaded.keys() == saved.keys()
        for name, values in saved.items():
            assert loaded[name].dtype == values.dtype, name
            assert numpy.array_equal(loaded[name], values), name


def test_every_row_is_in_one_file(two_ranks, tmp_path):
    saved = two_ranks.run(save_odd, tmp_path / "saved")[0]
    first, second = (
        raw_parts(tmp_path / "saved" / f"optimizer.rank{rank}of2.safetensors") for rank in range(2)
    )
    name = "exp_avg.embedding.weight"
    assert (first[name][0], second[name][0]) == ([0, 0], [3, 0])
    both = numpy.concatenate([first[name][1], second[name][1]])
    assert numpy.array_equal(both, saved["embedding.weight/exp_avg"])
    assert second["exp_avg.narrow.weight"][1].shape == (0, 3)
    assert first["step.narrow.weight"][1] == 2
    assert not [name for name in second if name.startswith("step.")]


def test_nothing_is_unpickled(two_ranks, make_spec, make_groups, model_dir, tmp_path):
    spec = make_spec()
    saved = tmp_path / "saved"
    before = two_ranks.run(
        live_without_pickle, Job(spec, model_dir, updates=[(0, make_groups())], save=saved)
    )
    clock = PolicyClock(completed_steps=1, published_step=-1, next_rollout_id=1)
    restore = Job(spec, model_dir, load=(saved, clock))
    after = [*two_ranks.run(live_without_pickle, restore)]
    with no_pickle():
        after.append(live(SingleRank(), restore))
    for outcome in after:
        for name, values in before[0].moments.items():
            assert numpy.array_equal(outcome.moments[name], values), name
    for path in saved.iterdir():
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            raw_parts(path)


@pytest.mark.parametrize(("rows", "begin"), [(2, 5), (5, 2)])
def test_rows_that_are_missing_or_held_twice_are_refused(two_ranks, tmp_path, rows, begin):
    """The first rank's part has rows 0 to 3 of 7."""
    two_ranks.run(write_rows, tmp_path)
    read_rows(SingleRank(), tmp_path)
    save_file(
        {"w": torch.zeros(rows, 2)},
        tmp_path / "model.rank1of2.safetensors",
        metadata={"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [begin, 0]}})},
    )
    with pytest.raises(ContractViolation, match=r"the parts of w .* do not make up its shape"):
        read_rows(SingleRank(), tmp_path)


@pytest.mark.parametrize("info", ["{}", "none"])
def test_a_header_that_does_not_say_where_its_rows_belong_is_refused(two_ranks, tmp_path, info):
    two_ranks.run(write_rows, tmp_path)
    part = tmp_path / "model.rank1of2.safetensors"
    save_file(load_file(part), part, metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(ContractViolation, match="do not say where their rows belong"):
        read_rows(SingleRank(), tmp_path)


def test_another_shape_is_refused(two_ranks, tmp_path):
    """Without a header every part begins at the first row."""
    two_ranks.run(write_rows, tmp_path)
    part = tmp_path / "model.rank1of2.safetensors"
    save_file(load_file(part), part)
    with pytest.raises(ContractViolation, match=r"w has shape \(4, 2\) .*the model's is \(7, 2\)"):
        read_rows(SingleRank(), tmp_path)


def test_another_type_is_refused(tmp_path):
    save_file({"w": torch.zeros(7, 2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with pytest.raises(ContractViolation, match=r"torch\.bfloat16, the model's is .*float32"):
        read_rows(SingleRank(), tmp_path)


def test_a_flipped_byte_is_found_by_the_marker(two_ranks, make_spec, model_dir, tmp_path):
    """Of any of the parts: every rank's files are under it."""
    token = FenceToken(epoch=1, update=0, attempt=1)
    store, folder = Store(str(tmp_path / "root")), layout.checkpoint_folder(-1, token)
    job = Job(make_spec(), model_dir, save=store.local_path(folder))
    files = two_ranks.run(live, job)[0].saved
    run = RunRef(run_id="train/a", root=store.root, spec_sha256="5bec")
    ref = commit.commit_checkpoint(store, run, token, START, DataState(), files, folder)
    assert len(commit.verify_checkpoint(store, ref).files) == 6
    for path in sorted(store.local_path(folder).glob("*.safetensors")):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DigestMismatch, match=f"{path.name}: recorded SHA-256"):
            commit.verify_checkpoint(store, ref)
        path.write_bytes(content)


def test_a_checkpoint_of_another_model_is_refused_by_all(
    two_ranks, make_spec, model_dir, mixture_dir, tmp_path
):
    spec = make_spec()
    two_ranks.run(live, Job(spec, mixture_dir, save=tmp_path / "saved"))
    for error in two_ranks.run(live, Job(spec, model_dir, load=(tmp_path / "saved", START))):
        assert type(error) is ContractViolation
        assert "rank 1: ContractViolation: " in error.message
        assert "does not fit this model" in error.message


def test_files_of_one_process_without_offsets_are_read(two_ranks, tmp_path):
    """As releases wrote them that had no parts."""
    saved = on(two_ranks, 1, save_odd, tmp_path / "saved")[0]
    for path in (tmp_path / "saved").glob("*.safetensors"):
        save_file(load_file(path), path)
    state = tmp_path / "saved" / "state.json"
    document = json.loads(state.read_text())
    assert document.pop("num_parts") == 1
    state.write_text(json.dumps(document))
    for loaded in two_ranks.run(load_odd, tmp_path / "saved"):
        for name, values in saved.items():
            assert numpy.array_equal(loaded[name], values), name


def test_parts_with_an_index_are_refused_by_name(two_ranks, tmp_path):
    on(two_ranks, 1, save_odd, tmp_path / "saved")
    (tmp_path / "saved" / "shards.json").write_text("{}")
    for error in two_ranks.run(load_odd, tmp_path / "saved"):
        assert "an index shards.json, which this version does not read" in error.message
