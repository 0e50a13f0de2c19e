"""The copy of weights on a GPU that a replaced engine's folder is written from."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from workers.trainers.host_copy import WeightsCopy
from workers.trainers.ranks import SingleRank
from workers.trainers.weights import export_weights

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=4096, num_attention_heads=8, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config).to("cuda")


def test_a_copy_on_the_host_is_the_folder_that_an_export_writes(tmp_path, model) -> None:
    companions = tmp_path / "prepared"
    model.save_pretrained(companions)
    copy = WeightsCopy(model, SingleRank(), torch.bfloat16)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ref = export_weights(
            model, companions, version, tmp_path / f"export{version}", torch.bfloat16
        )
        copy.take()
        expected = {
            name: parameter.detach().to(torch.bfloat16).cpu()
            for name, parameter in model.named_parameters()
        }
        # What the trainer does next is not in it: the copy is whole when ``take`` returns.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        copy.write(companions, tmp_path / f"copy{version}")
        written = load_file(tmp_path / f"copy{version}" / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
        exported = (tmp_path / f"export{version}" / "model.safetensors").read_bytes()
        assert (tmp_path / f"copy{version}" / "model.safetensors").read_bytes() == exported
        assert copy.num_bytes == sum(each.nbytes for each in expected.values())
        assert ref.num_tensors == len(expected)
