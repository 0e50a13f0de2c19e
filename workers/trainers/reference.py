"""The reference of the KL term: a frozen copy of the prepared model."""

from pathlib import Path
from typing import Any

import torch

from configs.run import RunSpec
from workers.trainers.decoder_layers import compile_layers
from workers.trainers.load import EXPERTS, attention_of, load_model, prepare_layers


def load_reference(spec: RunSpec, model_dir: Path, device: torch.device) -> Any | None:
    """The prepared model once more, frozen, in float32 like the master weights; None without KL.

    At version 0 its log-probs are the trainer's, so the KL term starts at exactly 0. It is the
    prepared model after a restore as well: checkpoints do not hold it.
    """
    if spec.training.kl_loss_coef == 0:
        return None
    model = load_model(model_dir, attention=attention_of(spec), experts=EXPERTS[device.type])
    # what is compiled for the policy serves a model whose parameters look alike
    model.to(device).eval().requires_grad_(spec.trainer.compile)
    prepare_layers(spec, model)
    if spec.trainer.compile:
        compile_layers(model)
    return model
