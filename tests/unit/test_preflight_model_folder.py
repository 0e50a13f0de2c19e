"""``doctor gpu`` on model folders: a sound one, and each fault that would pass unnoticed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.model import TinySpec
from workers.preflight.finding import Finding
from workers.preflight.model_folder import examine_folder
from workers.sources.tiny import make_tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "warmup_accuracy": 0,
}
CHAT = (
    "{% for m in messages %}{{ '<bos>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>' }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path, TinySpec(**SIZES), [])
    return tmp_path


def change_json(file: Path, **changes: Any) -> None:
    value = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def change_tensors(folder: Path, **changes: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def use_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)


def found(folder: Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine_folder(folder)}


def failures(folder: Path) -> list[str]:
    return [name for name, finding in found(folder).items() if finding.ok is False]


def test_a_sound_folder_passes(folder: Path) -> None:
    assert failures(folder) == []
    # its template closes no turn: nothing to judge
    assert found(folder)["end of a turn"].ok is None
    use_template(folder, CHAT)
    assert found(folder)["end of a turn"].ok is True


def test_an_unknown_architecture(folder: Path) -> None:
    change_json(folder / "config.json", model_type="qwen99")
    findings = examine_folder(folder)
    assert any("qwen99" in finding.seen for finding in findings if finding.ok is False)


def test_a_head_that_would_be_random(folder: Path) -> None:
    change_json(folder / "config.json", tie_word_embeddings=False)
    assert failures(folder) == ["head"]
    change_tensors(folder, **{"lm_head.weight": torch.zeros(100, 32)})
    assert failures(folder) == []


def test_a_tied_head_with_weights_of_its_own(folder: Path) -> None:
    change_tensors(folder, **{"lm_head.weight": torch.zeros(100, 32)})
    assert failures(folder) == ["head"]


def test_a_tied_mixture_of_experts(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, TinySpec(architecture="qwen3_moe", **SIZES), [])
    assert failures(tmp_path) == []
    change_json(tmp_path / "config.json", tie_word_embeddings=True)
    head = found(tmp_path)["head"]
    assert head.ok is False
    assert "uniform logits" in head.seen


@pytest.mark.parametrize("told", ["bfloat16", "float16"])
def test_a_configuration_that_names_another_type(folder: Path, told: str) -> None:
    change_json(folder / "config.json", dtype=told)
    assert failures(folder) == ["data type"]


def test_tensors_of_two_types(folder: Path) -> None:
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    change_tensors(folder, **{"model.norm.weight": norm.bfloat16()})
    finding = found(folder)["data type"]
    assert (finding.ok, finding.seen) == (False, "BF16, F32; config.json says float32")


def test_a_vocabulary_without_rows(folder: Path) -> None:
    change_tensors(folder, **{"model.embed_tokens.weight": torch.zeros(96, 32)})
    finding = found(folder)["vocabulary"]
    assert finding.ok is False
    assert finding.seen == "100 tokens, vocab_size 100, 96 rows of embedding"


def test_no_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert "chat template" in failures(folder)


def test_a_template_that_refuses_a_turn(folder: Path) -> None:
    use_template(folder, "{{ raise_exception('system turn first') }}")
    finding = found(folder)["chat template"]
    assert finding.ok is False
    assert "system turn first" in finding.seen


def test_a_turn_that_ends_with_no_stop_token(folder: Path) -> None:
    use_template(folder, CHAT.replace("<eos>", "<unk>"))
    assert failures(folder) == ["end of a turn"]


def test_an_end_of_sequence_that_stops_nothing(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=7)
    assert failures(folder) == ["end of sequence"]


def test_padding_that_also_ends_a_response_is_told(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", pad_token="<eos>")
    finding = found(folder)["padding"]
    assert (finding.ok, finding.seen) == (None, "2, which also ends a response")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_one_finding(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    (finding,) = examine_folder(folder)
    assert finding.ok is False


def test_no_folder(tmp_path: Path) -> None:
    (finding,) = examine_folder(tmp_path / "absent")
    assert finding.ok is False
