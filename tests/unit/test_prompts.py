"""Prepared data: rendering, checks, immutability. The tokenizer here has one id a character."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from activities.storage.store import Store
from configs.run import RunSpec
from models.errors import ConfigurationError, DigestMismatch
from workers.sources import prompts
from workers.sources.prompts import load_prompts, prepare_data, train_sha256

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {"<unk>": 0, "<s>": 1} | {c: n for n, c in enumerate(CHARACTERS, start=2)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>"
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(str(folder))
    return folder


def spec_of(root: Path, data: dict[str, Any], **core: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "schema_version": 1,
            "name": "t",
            "model": {"source": "tiny"},
            "output": {"root": str(root)},
            "data": data,
            "core": {"max_context_length": 64, **core},
            "inference": {"max_response_length": 8},
        }
    )


def words(train: int = 6, held_out: int = 3, **task: Any) -> dict[str, Any]:
    row = {"task": "reverse_word", "train_count": train, "eval_count": held_out, **task}
    return {"tasks": (row,)}


class Setup:
    """A root, and data files next to it."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.folder = folder
        self.model_dir = model_dir
        self.store = Store(folder / "root")

    def prepare(self, data: dict[str, Any], **core: Any) -> prompts.PreparedData:
        spec = spec_of(self.folder / "root", data, **core)
        return prepare_data(spec, self.store, self.model_dir)

    def file(self, content: str | bytes, name: str = "train.jsonl") -> str:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def lines(self, *rows: dict[str, Any], name: str = "train.jsonl") -> str:
        return self.file("".join(json.dumps(row) + "\n" for row in rows), name)


@pytest.fixture
def setup(tmp_path: Path, model_dir: Path) -> Setup:
    return Setup(tmp_path, model_dir)


def ids_of(text: str) -> tuple[int, ...]:
    """Independent of the tokenizer: position in the alphabet plus two."""
    return tuple(CHARACTERS.index(c) + 2 if c in CHARACTERS else 0 for c in text)


def test_task_rows_are_rendered_and_tokenized(setup: Setup) -> None:
    result = setup.prepare(words(prompt_suffix=" now"))
    assert (result.train_prompts, result.eval_prompts, result.reused) == (6, 3, False)
    train, held_out = load_prompts(setup.store, "train"), load_prompts(setup.store, "eval")
    assert [row.metadata.prepared_sample_id for row in train] == [
        f"reverse_word:train:{n}" for n in range(6)
    ]
    for row in (*train, *held_out):
        word = row.metadata.query.removeprefix("reverse ").removesuffix("= now")
        assert row.input == f"[user]reverse {word}= now\n[assistant]"
        assert row.label == word[::-1]
        assert row.prompt_token_ids == ids_of(row.input)
        assert row.metadata.run_prompt_tokens == len(row.input)
        packed = struct.pack(f"<{len(row.input)}i", *ids_of(row.input))
        assert row.metadata.run_prompt_token_ids_sha256 == hashlib.sha256(packed).hexdigest()
        assert [(v.name, v.target, v.weight) for v in row.metadata.verifiers] == [
            ("exact", row.label, 1.0)
        ]
    assert not {row.input for row in train} & {row.input for row in held_out}


def test_manifest_records_every_digest(setup: Setup) -> None:
    result = setup.prepare(words())
    folder = setup.folder / "root" / "prepared" / "data"
    assert sorted(path.name for path in folder.iterdir()) == [
        "eval.jsonl",
        "manifest.json",
        "train.jsonl",
        "verifiers.json",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["data"]
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("train.jsonl", "eval.jsonl", "verifiers.json"):
        assert manifest["outputs"][name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert result.train_sha256 == manifest["outputs"]["train.jsonl"] == train_sha256(setup.store)
    tokenizer = hashlib.sha256((setup.model_dir / "tokenizer.json").read_bytes()).hexdigest()
    assert manifest["contract"]["tokenizer_files"]["tokenizer.json"] == tokenizer


def test_the_same_configuration_gives_the_same_bytes(setup: Setup, tmp_path: Path) -> None:
    first = setup.prepare(words())
    again = setup.prepare(words())
    assert again.reused
    assert again.train_sha256 == first.train_sha256
    other = Setup(tmp_path / "other", setup.model_dir)
    assert other.prepare(words()).train_sha256 == first.train_sha256


def test_jsonl_in_all_shapes(setup: Setup) -> None:
    train = setup.lines(
        {"prompt": "one", "answer": "a"},
        {"question": "two", "ground_truth": 42, "verifier": "number", "source": "ignored"},
        {
            "messages": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y"},
                {"role": "user", "content": "three"},
            ],
            "label": 2.5,
        },
    )
    setup.prepare({"prompt_data": train})
    rows = load_prompts(setup.store, "train")
    assert [row.input for row in rows] == [
        "[user]one\n[assistant]",
        "[user]two\n[assistant]",
        "[system]S\n[user]x\n[assistant]y\n[user]three\n[assistant]",
    ]
    assert [row.label for row in rows] == ["a", "42", "2.5"]
    assert [row.metadata.verifiers[0].name for row in rows] == ["exact", "number", "exact"]
    assert [row.metadata.query for row in rows] == ["one", "two", "three"]
    assert rows[2].metadata.prepared_sample_id == "train.jsonl:train:2"
    assert load_prompts(setup.store, "eval") == []


def test_only_line_feeds_end_records(setup: Setup) -> None:
    text = "a\u2028b\u2029c\u0085d"
    line = json.dumps({"prompt": text, "answer": text}, ensure_ascii=False)
    content = "\ufeff" + line + "\r\n\n   \n" + json.dumps({"prompt": "e", "answer": "f"})
    setup.prepare({"prompt_data": setup.file(content)})
    rows = load_prompts(setup.store, "train")
    assert [row.label for row in rows] == [text, "f"]
    prepared = (setup.folder / "root" / "prepared" / "data" / "train.jsonl").read_bytes()
    assert text.encode() in prepared
    assert prepared.count(b"\n") == 2
    keys = list(json.loads(prepared.split(b"\n")[0]))
    assert keys == ["input", "label", "metadata", "prompt_token_ids"]


GOOD = '{"prompt": "p", "answer": "a"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + '{"prompt": "x"', r"train\.jsonl line 2: malformed JSON"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "s"}, '
            '{"role": "user", "content": "y"}], "answer": "a"}\n',
            r"train row 1 .*system must come first",
        ),
        ("", r"train\.jsonl: no records"),
        ("\n \n", r"train\.jsonl: no records"),
    ],
)
def test_bad_data_is_refused_and_leaves_nothing(
    setup: Setup, content: str | bytes, message: str
) -> None:
    path = setup.file(content)
    with pytest.raises(ConfigurationError, match=message):
        setup.prepare({"prompt_data": path})
    assert not setup.store.exists("prepared/data")
    assert setup.store.list("prepared", hidden=True) == []


def test_missing_file_is_named(setup: Setup) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.prompt_data: cannot read .*nope\.jsonl"):
        setup.prepare({"prompt_data": str(setup.folder / "nope.jsonl")})


def test_prompt_must_leave_room_for_the_response(setup: Setup) -> None:
    # "[user]" + text + "\n[assistant]" = text + 18 characters; 64 - 8 leaves 56
    fits = {"prompt": "x" * 38, "answer": "a"}
    long = {"prompt": "x" * 39, "answer": "a"}
    path = setup.lines(fits, long)
    with pytest.raises(
        ConfigurationError,
        match=r"train row 2 .*line 2.*: 57 prompt tokens.* 8 .*max_context_length 64",
    ):
        setup.prepare({"prompt_data": path})
    setup.prepare({"prompt_data": setup.lines(fits)})
    assert load_prompts(setup.store, "train")[0].metadata.run_prompt_tokens == 56


def test_train_and_held_out_must_not_overlap(setup: Setup) -> None:
    train = setup.lines({"prompt": "p", "answer": "a"}, {"prompt": "same", "answer": "a"})
    held_out = setup.lines(
        {"prompt": "q", "answer": "a"}, {"prompt": "same", "answer": "b"}, name="eval.jsonl"
    )
    with pytest.raises(ConfigurationError, match=r"eval row 2 repeats train row 2 .*same"):
        setup.prepare({"prompt_data": train, "eval_prompt_data": held_out})


def test_empty_held_out_file_is_refused(setup: Setup) -> None:
    train = setup.lines({"prompt": "p", "answer": "a"})
    with pytest.raises(ConfigurationError, match=r"eval\.jsonl: no records"):
        setup.prepare({"prompt_data": train, "eval_prompt_data": setup.file("\n", "eval.jsonl")})


def change_seed(setup: Setup, data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "seed": 18}


def change_input(setup: Setup, data: dict[str, Any]) -> dict[str, Any]:
    setup.lines({"prompt": "p", "answer": "other"})
    return data


def change_output(setup: Setup, data: dict[str, Any]) -> dict[str, Any]:
    path = setup.folder / "root/prepared/data/train.jsonl"
    path.write_bytes(path.read_bytes().replace(b"answer", b"Answer").replace(b"[u", b"[v"))
    return data


def remove_output(setup: Setup, data: dict[str, Any]) -> dict[str, Any]:
    (setup.folder / "root/prepared/data/eval.jsonl").unlink()
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_seed, r"data\.seed was 17, is 18 .*recorded [0-9a-f]{64}, now [0-9a-f]{64}"),
        (
            change_input,
            r"data\.prompt_data changed .*recorded SHA-256 [0-9a-f]{64}, now [0-9a-f]{64}",
        ),
        (
            change_output,
            r"train\.jsonl was altered: recorded SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}",
        ),
        (remove_output, r"eval\.jsonl was altered: .*missing"),
    ],
)
def test_prepared_data_is_immutable(
    setup: Setup, change: Callable[[Setup, dict[str, Any]], dict[str, Any]], message: str
) -> None:
    data: dict[str, Any] = {"prompt_data": setup.lines({"prompt": "p", "answer": "a"})}
    setup.prepare(data)
    setup.store.write_json("rollouts/0000000.e1.json", {})
    with pytest.raises(ConfigurationError, match=message):
        setup.prepare(change(setup, data))


@pytest.mark.parametrize("change", [change_seed, change_input])
def test_what_a_failed_start_left_gives_way_to_corrected_input(
    setup: Setup, change: Callable[[Setup, dict[str, Any]], dict[str, Any]]
) -> None:
    data: dict[str, Any] = {"prompt_data": setup.lines({"prompt": "p", "answer": "a"})}
    setup.prepare(data)  # and then the start failed: nothing was sampled
    changed = change(setup, data)
    assert not setup.prepare(changed).reused
    assert setup.prepare(changed).reused


def test_another_tokenizer_is_refused(setup: Setup, tmp_path: Path) -> None:
    setup.prepare(words())
    setup.store.write_json("rollouts/0000000.e1.json", {})
    other = tmp_path / "model"
    other.mkdir()
    for path in setup.model_dir.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    template = next(path for path in other.iterdir() if b"[assistant]" in path.read_bytes())
    template.write_bytes(template.read_bytes().replace(b"[assistant]", b"[model]"))
    setup.model_dir = other
    with pytest.raises(
        ConfigurationError, match=rf"tokenizer_files\.{template.name} was [0-9a-f]+"
    ):
        setup.prepare(words())


def test_folder_without_a_manifest_is_never_adopted(setup: Setup) -> None:
    setup.store.write_bytes("prepared/data/train.jsonl", b"{}\n")
    with pytest.raises(ConfigurationError, match=r"manifest\.json is missing"):
        setup.prepare(words())


def test_object_store_prepares_again_without_a_manifest(setup: Setup, tmp_path: Path) -> None:
    store = Store(f"memory://{tmp_path.name}/root")
    store.write_bytes("prepared/data/train.jsonl", b"{}\n")
    spec = spec_of(tmp_path, words())
    first = prepare_data(spec, store, setup.model_dir)
    assert not first.reused
    assert prepare_data(spec, store, setup.model_dir).reused
    assert len(load_prompts(store, "train")) == 6


def test_input_that_changes_meanwhile(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    path = setup.lines({"prompt": "p", "answer": "a"})
    real = prompts.jsonl_rows

    def slow(*args: Any) -> Any:
        rows = real(*args)
        setup.lines({"prompt": "p", "answer": "b"})
        return rows

    monkeypatch.setattr(prompts, "jsonl_rows", slow)
    with pytest.raises(ConfigurationError, match="changed while it was being prepared"):
        setup.prepare({"prompt_data": path})
    assert not setup.store.exists("prepared/data")


def test_a_second_start_that_finishes_first_wins(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.rename

    def overtaken(store: Store, source: str, target: str) -> None:
        monkeypatch.setattr(Store, "rename", real)
        staged = store.local_path(source)
        staged.rename(staged.parent / "kept")
        setup.prepare(words())
        (staged.parent / "kept").rename(staged)
        real(store, source, target)

    monkeypatch.setattr(Store, "rename", overtaken)
    assert setup.prepare(words()).reused
    assert setup.store.list("prepared", hidden=True) == ["data"]


def test_killed_preparation_is_cleaned_up(setup: Setup) -> None:
    setup.store.write_bytes("prepared/.data.preparing-0123/train.jsonl", b"half")
    setup.prepare(words())
    assert setup.store.list("prepared", hidden=True) == ["data"]


def test_altered_rows_are_not_loaded(setup: Setup) -> None:
    setup.prepare(words())
    path = setup.folder / "root/prepared/data/train.jsonl"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DigestMismatch, match=r"train\.jsonl"):
        load_prompts(setup.store, "train")


def test_model_without_template_or_tokenizer(setup: Setup, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in setup.model_dir.iterdir():
        if path.suffix != ".jinja":
            (bare / path.name).write_bytes(path.read_bytes())
    setup.model_dir = bare
    with pytest.raises(ConfigurationError, match="has no chat template"):
        setup.prepare(words())
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match="no usable tokenizer"):
        setup.prepare(words())


def test_gym_rows_choose_their_verifier(setup: Setup) -> None:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = {"train_count": 4, "params": params}
    data = {
        "tasks": (
            {"task": "gym:products", **task},
            {"task": "gym:spell_backward", "train_count": 4, "prompt_suffix": " Go."},
        )
    }
    setup.prepare(data, max_context_length=256)
    rows = load_prompts(setup.store, "train")
    by_source = {
        source: {
            row.metadata.verifiers[0].name for row in rows if row.metadata.source_dataset == source
        }
        for source in ("gym:products", "gym:spell_backward")
    }
    assert by_source == {"gym:products": {"number"}, "gym:spell_backward": {"gym"}}
    for row in rows:
        assert row.metadata.extra["answer"] == row.label
        assert row.metadata.query.startswith(row.metadata.extra["question"])
    assert len({row.metadata.prepared_sample_id for row in rows}) == 8
