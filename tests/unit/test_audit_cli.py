"""``perdure audit``: exit codes, the JSON object, and lives of prompts; with a real producer."""

import json
from pathlib import Path

import pytest
from synthetic_run import TIED, SyntheticRun

from activities.analysis.audit import audit
from activities.analysis.lives import Fate
from activities.rollout.collection_file import read_collection
from activities.storage import layout
from models.ids import FenceToken
from models.prompt import DataState
from models.rollout import CollectionManifest, CollectRequest
from workers.cli.app import run_command

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"


@pytest.fixture
def run(tmp_path):
    return SyntheticRun(str(tmp_path / "root"))


def answer(capsys, *arguments):
    code = run_command(["audit", *arguments])
    return code, capsys.readouterr().out


def test_json_of_a_clean_run(run, capsys):
    run.updates(0, 2, dropped=1)
    run.checkpoint()
    run.lose_trainer()
    run.updates(3, 3)
    code, out = answer(capsys, run.store.root, "--json")
    assert code == 0
    assert out.count("\n") == 1
    report = json.loads(out)
    assert report.pop("cursor") == "rollouts/0000003.e2.json"
    assert report.pop("notes") == ["update 3 is in no checkpoint yet"]
    assert report == {
        "run_id": "train/made",
        "updates": 4,
        "updates_doubled": 0,
        "updates_lost": 0,
        "updates_redone": 0,
        "updates_unrecorded": 0,
        "updates_unreadable": 0,
        "prompts_drawn": 19,
        "prompts_trained": 16,
        "prompts_pending": 0,
        "prompts_dropped": {TIED: 3},
        "prompts_missing": 0,
        "prompts_doubled": 0,
        "prompts_mixed_up": 0,
        "prompts_wrong_in_checkpoint": 0,
        "groups_incomplete": 0,
        "prompts_requeued": 0,
        "prompts_stale": 0,
        "prompts_overtaken": 0,
        "verdict": "accounted for: 19 prompts drawn, none missing, none doubled; "
        "4 updates, each applied once",
    }


@pytest.mark.parametrize("fault", ["missing", "doubled", "update"])
def test_a_fault_is_exit_1(run, capsys, fault):
    run.updates(0, 1)
    if fault == "missing":
        run.store.remove_tree(layout.collection_parquet(1, 1))
    elif fault == "doubled":
        stale = CollectionManifest.model_validate(
            run.store.read_json(layout.collection_manifest(0, 1))
        )
        run.source = run.source_at(stale.data_after)
        run.updates(2, 2)
    else:
        run.row(1, 1, "f" * 64, 2)
    code, out = answer(capsys, run.store.root)
    assert code == 1
    assert out.splitlines()[-1].startswith("not accounted for: ")
    assert answer(capsys, run.store.root, "--json")[0] == 1


def test_a_root_without_a_run_is_exit_2(tmp_path, capsys):
    assert run_command(["audit", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"perdure: {tmp_path}: holds no run; name the output.root of one\n"
    )


def test_a_run_file_stands_for_its_root(run, tmp_path, capsys):
    run.updates(0, 2)
    recipe = (RECIPES / "tiny.toml").read_text()
    written = tmp_path / "mine.toml"
    written.write_text(recipe.replace("runs/tiny", run.store.root))
    assert answer(capsys, str(written), "--json") == answer(capsys, run.store.root, "--json")
    assert run_command(["audit", str(tmp_path / "mien.toml")]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_lives_are_shown_up_to_the_limit_the_wrong_ones_first(run, capsys):
    run.updates(0, 2)
    run.store.remove_tree(layout.collection_parquet(2, 1))
    code, out = answer(capsys, run.store.root, "--prompts", "--limit", "5")
    assert code == 1
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines[1:6]] == ["8", "9", "10", "11", "0"]
    (first,) = run.source_at(DataState()).draw(1)
    assert (
        " ".join(lines[5]) == f"0 {first.prepared_sample_id} 0 trained trained update 0, version 1"
    )
    assert "7 more: raise --limit" in out
    report = json.loads(answer(capsys, run.store.root, "--prompts", "--limit", "5", "--json")[1])
    assert [life["group_index"] for life in report["prompts"]] == [8, 9, 10, 11, 0]
    assert report["prompts"][4]["trained"] == [{"update": 0, "policy_version": 1}]


async def test_collections_of_the_real_producer(rig):
    """Ties dropped, an epoch lost in the middle, the pass over the data ending in between."""
    rig.store.write_json(layout.WORKFLOW_JSON, {"run_id": "train/rig"})
    spec = rig.spec(
        core={"filter_zero_std_groups": True},
        training={"rollout_batch_size": 3, "samples_per_prompt": 2},
    )
    producer = rig.producer(spec, num_prompts=7)
    trained, dropped = [], 0
    for update in range(4):
        epoch = 1 if update < 2 else 2
        token = FenceToken(epoch=epoch, update=update, attempt=1)
        await producer.set_engines(token, ("http://one",))
        rig.engine.version = str(update)
        request = CollectRequest(
            run=rig.run,
            epoch=epoch,
            update=update,
            policy_version=update,
            consumed_through=update - 1,
        )
        collection = await producer.collect(token, request)
        if update == 1:  # the worker dies before it trains: the same producer collects again
            epoch, token = 2, FenceToken(epoch=2, update=update, attempt=1)
            producer.revoke(1)
            await producer.set_engines(token, ("http://one",))
            request = request.model_copy(update={"epoch": 2})
            collection = await producer.collect(token, request)
        row = {"update": update, "epoch": epoch, "batch_sha256": collection.sha256}
        rig.store.append_jsonl(layout.UPDATES, row | {"policy_version": update + 1})
        trained += [group.group_index for group in read_collection(rig.store, collection)]
        dropped += sum(collection.counts.filtered_groups.values())
    books = audit(rig.store.root)
    assert dropped > 0
    assert [each.group_index for each in books.trained] == trained
    assert books.count(Fate.TRAINED) == 12
    assert books.count(Fate.DROPPED) == dropped
    assert len(books.lives) == 12 + dropped
    assert books.is_clean, books.verdict
