"""Groups with the expert routes of a mixture."""

from pathlib import Path

import numpy as np
import torch

from models.sample import SampleGroup
from workers.trainers.load import load_model


def routed(groups: list[SampleGroup], folder: Path) -> list[SampleGroup]:
    """The routes of the model in ``folder``, by plain forwards."""
    model = load_model(folder)
    for group in groups:
        for sample in group.samples:
            ids = torch.tensor([sample.prompt_token_ids + sample.response_token_ids])
            with torch.no_grad():
                logits = model(input_ids=ids, output_router_logits=True).router_logits
            chosen = torch.stack([layer.topk(2, -1).indices for layer in logits], 1)[:-1]
            sample.routed_experts = np.ascontiguousarray(chosen.numpy().astype("<i4")).tobytes()
    return groups
