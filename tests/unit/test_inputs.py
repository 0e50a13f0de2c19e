"""What ``validate`` and ``run`` look into before anything is started."""

from pathlib import Path
from typing import Any

import pytest

from configs.load import resolve_document
from tests.support.fake_sglang import write_fake_sglang
from workers.sources.inputs import find_input_problems


def problems(folder: Path, **sections: Any) -> list[str]:
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": "x",
        "model": {"source": "org/on-the-hub"},
        "data": {"tasks": [{"task": "reverse_word", "train_count": 4, "params": {"letters": 3}}]},
        "output": {"root": str(folder / "root")},
        "core": {"max_context_length": 64},
        "inference": {"max_response_length": 8},
    }
    document.update(sections)
    spec = resolve_document(document, origin="x.toml").spec
    return [str(problem) for problem in find_input_problems(spec)]


def model(folder: Path, **files: str) -> dict[str, str]:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return {"source": str(folder)}


def test_a_hub_id_is_not_fetched_and_good_data_is_silent(tmp_path: Path) -> None:
    assert problems(tmp_path) == []
    assert not (tmp_path / "root").exists()


def test_a_root_that_cannot_be_owned_is_refused_before_a_start(tmp_path: Path) -> None:
    assert problems(tmp_path, output={"root": "s3://bucket/run"}) == []
    assert problems(tmp_path, output={"root": "memory://bucket/run"}) == [
        'output.root = "memory://bucket/run": a run needs a store that creates an object only '
        "where none is; use a local folder, or one of s3://, gs://"
    ]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config__json": "{}"}, "holds no *.safetensors"),
        ({"config__json": "{}", "m__safetensors": ""}, "has no tokenizer"),
        (
            {"config__json": "{", "m__safetensors": "", "tokenizer__json": "{}"},
            "config.json cannot be read as JSON",
        ),
        (
            {"config__json": '{"model_type": "t5"}', "m__safetensors": "", "vocab__json": "{}"},
            "model_type 't5' is not supported",
        ),
    ],
)
def test_model_folders(tmp_path: Path, files: dict[str, str], message: str) -> None:
    (problem,) = problems(tmp_path, model=model(tmp_path / "m", **files))
    assert message in problem
    assert str(tmp_path / "m") in problem


def test_a_model_folder_that_is_not_there(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, model={"source": str(tmp_path / "m")})
    assert problem == f'model.source = "{tmp_path / "m"}": no such folder'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty"),
        ([""], "{file}: no records"),
        (['{"prompt": "a", "answer": "b"}', '{"prompt": '], "{file} line 2: malformed JSON"),
        (['{"prompt": "a"}'], "{file} line 1: needs exactly one of answer"),
    ],
)
def test_data_files(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "my prompts ✓.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    (problem,) = problems(tmp_path, data={"prompt_data": str(path)})
    assert message.format(file=path) in problem


def test_missing_files_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data = {"prompt_data": str(tmp_path / "a"), "eval_prompt_data": str(tmp_path / "b")}
    found = problems(tmp_path, data=data, output={"root": str(tmp_path / "file" / "root")})
    assert [line.split(" = ")[0] for line in found] == [
        "data.prompt_data",
        "data.eval_prompt_data",
        "output.root",
    ]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"task": "reverse_word", "params": {"leters": 3}}, "has no parameter 'leters'"),
        ({"task": "gym:chain_sums"}, "did you mean chain_sum"),
        ({"task": "gym:chain_sum", "params": {"min_trms": 2}}, "gym:chain_sum refuses params"),
    ],
)
def test_generators(tmp_path: Path, task: dict[str, Any], message: str) -> None:
    (problem,) = problems(tmp_path, data={"tasks": [{**task, "train_count": 4}]})
    assert message in problem


def test_arguments_that_the_installed_sglang_lacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = write_fake_sglang(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    monkeypatch.setenv("PERDURE_SGLANG_PYTHON", environment["PERDURE_SGLANG_PYTHON"])
    told = {"engine": "sglang", "max_response_length": 8}
    [found] = problems(tmp_path, inference=told | {"sglang": {"mem_fraction": 0.5}})
    assert found == (
        "inference.sglang.mem_fraction = 0.5: the installed SGLang has no such argument; did you "
        "mean 'mem_fraction_static'?"
    )
    assert problems(tmp_path, inference=told | {"sglang": {"mem_fraction_static": 0.5}}) == []
