"""Exports: Hugging Face folders that others load, with digests that others can recompute."""

import json
import shutil

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from activities.wire.digest import weights_digest
from models.errors import ContractViolation
from workers.sources.tensor_file import write_tensors
from workers.trainers.export import ExportProbe
from workers.trainers.local import LocalTrainer

PROBE = ExportProbe(prompt_ids=(1, 20, 30, 40), question="what?", max_new_tokens=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_are_the_cast_parameters(make_spec, model_dir, tmp_path, dtype):
    trainer = LocalTrainer(make_spec(inference={"dtype": dtype}), model_dir)
    ref = trainer.export_weights(0, tmp_path / "export")
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    own = dict(trainer.model.named_parameters())
    assert "lm_head.weight" not in tensors  # tied: written once, as the embedding
    assert tensors.keys() == own.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, own[name].detach().to(getattr(torch, dtype)))
    checksums = {
        name: xxhash.xxh3_64_hexdigest(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }
    assert ref.digest == weights_digest(checksums)
    assert (ref.version, ref.num_tensors, ref.dtype) == (0, len(tensors), dtype)
    assert ref.num_bytes == (tmp_path / "export" / "model.safetensors").stat().st_size
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == dtype


def test_transformers_loads_an_export_with_its_tokenizer(make_spec, model_dir, tmp_path):
    trainer = LocalTrainer(make_spec(), model_dir)
    trainer.export_weights(0, tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    ids = torch.tensor([[1, 20, 30, 40]])
    assert torch.equal(model(input_ids=ids).logits, trainer.model(input_ids=ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.decode(tokenizer.encode("reverse abc=")) == "reverse abc="


def test_untied_heads_are_written(make_spec, make_model, tmp_path):
    make_model("llama").save_pretrained(tmp_path / "llama")
    trainer = LocalTrainer(make_spec(), tmp_path / "llama")
    trainer.export_weights(0, tmp_path / "export")
    assert "lm_head.weight" in load_file(tmp_path / "export" / "model.safetensors")


def test_another_version_is_refused_and_nothing_appears(make_spec, model_dir, tmp_path):
    trainer = LocalTrainer(make_spec(), model_dir)
    with pytest.raises(ContractViolation, match="version 3 asked for, the trainer holds 0"):
        trainer.export_weights(3, tmp_path / "exports" / "v3")
    assert not (tmp_path / "exports").exists()


def test_a_failed_export_leaves_nothing(make_spec, model_dir, tmp_path, monkeypatch):
    trainer = LocalTrainer(make_spec(), model_dir)

    def fail(*_: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr("workers.trainers.weights.write_tensors", fail)
    with pytest.raises(OSError, match="planted"):
        trainer.export_weights(0, tmp_path / "exports" / "v0")
    assert list((tmp_path / "exports").iterdir()) == []


def test_final_export_is_proved_and_marked(make_spec, make_groups, model_dir, tmp_path):
    trainer = LocalTrainer(make_spec(), model_dir)
    trainer.optimize(0, "a", make_groups())
    report = trainer.export_hf(tmp_path / "hf", PROBE, "export-hf")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {
        ".complete",
        "config.json",
        "chat_template.jinja",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert report.max_abs_logit_difference <= 1e-5
    assert report.num_parameters == sum(p.numel() for p in trainer.model.parameters())
    assert (report.uri, report.policy_version, report.question) == ("export-hf", 1, "what?")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    prompt = torch.tensor([PROBE.prompt_ids])
    ids = prompt
    for _ in range(4):  # greedy decoding in the plainest way
        best = model(input_ids=ids).logits[0, -1].argmax().reshape(1, 1)
        ids = torch.cat([ids, best], 1)
        if int(best) == 2:
            break
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert report.answer == tokenizer.decode(ids[0, 4:], skip_special_tokens=True)


def test_large_logits_may_differ_by_rounding(make_spec, make_model, model_dir, tmp_path):
    model = make_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e4)
    model.save_pretrained(tmp_path / "loud")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, tmp_path / "loud")
    trainer = LocalTrainer(make_spec(), tmp_path / "loud")
    report = trainer.export_hf(tmp_path / "hf", PROBE, "hf")
    assert report.max_abs_logit_difference > 1e-4


def test_a_configuration_that_computes_something_else_is_refused(make_spec, model_dir, tmp_path):
    trainer = LocalTrainer(make_spec(), model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    with pytest.raises(ContractViolation, match="re-loaded logits differ"):
        trainer.export_hf(tmp_path / "hf", PROBE, "hf")
    assert not (tmp_path / "hf").exists()


def test_a_finished_export_of_these_weights_is_proved_again(
    make_spec, make_groups, model_dir, tmp_path
):
    trainer = LocalTrainer(make_spec(), model_dir)
    first = trainer.export_hf(tmp_path / "hf", PROBE, "hf")
    again = trainer.export_hf(tmp_path / "hf", PROBE, "hf")
    assert again.answer == first.answer
    trainer.optimize(0, "a", make_groups())
    with pytest.raises(ContractViolation, match=r"other values; it is a finished .* remove it"):
        trainer.export_hf(tmp_path / "hf", PROBE, "hf")


def test_a_foreign_folder_is_never_overwritten(make_spec, model_dir, tmp_path):
    (tmp_path / "hf").mkdir()
    with pytest.raises(ContractViolation, match="not a finished export"):
        LocalTrainer(make_spec(), model_dir).export_hf(tmp_path / "hf", PROBE, "hf")
    assert list((tmp_path / "hf").iterdir()) == []


def test_the_library_reads_every_type_back(tmp_path):
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor(3, dtype=torch.int64),
        "d": torch.randn(4, 3).t(),  # not contiguous
    }
    checksums = write_tensors(tmp_path / "x.safetensors", tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert checksums.keys() == back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
