"""Auxiliary losses of routers in the plainest way: one sequence at a time, loops, float64."""

from functools import partial
from typing import NamedTuple

import torch

from workers.trainers.batch import documents_of
from workers.trainers.documents import collate_documents
from workers.trainers.replay_check import Phase


class Layer(NamedTuple):
    """One routed layer: of every sample logits [T, E], with their graph, and experts [T, k]."""

    logits: list
    chosen: list


def plain_layers(model, batch, members, replay=None):
    """Every sample of its own through the model; experts by its routers, or by ``replay``."""
    found = []
    for member in members:
        sample = batch.samples[member]
        ids = torch.tensor([list(sample.prompt_ids) + list(sample.response_ids)])
        if replay is None:
            out = model(input_ids=ids, output_router_logits=True, use_cache=False)
            top_k = model.config.num_experts_per_tok
            found.append([(x, x.topk(top_k).indices) for x in out.router_logits])
            continue
        seen = []
        hooks = [
            router.register_forward_hook(partial(_note, seen))
            for name, router in model.named_modules()
            if name in replay.names
        ]
        with replay.micro_batch(collate_documents(documents_of(batch, [member])), Phase.TRAINING):
            model(input_ids=ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        found.append(seen)
    return [Layer(*map(list, zip(*layer, strict=True))) for layer in zip(*found, strict=True)]


def _note(seen, _module, _inputs, output):
    logits, _, chosen = output
    seen.append((logits, chosen))


def plain_losses(layers, parts, objective, top_k):
    """Weighted load balancing and z-loss of a step whose forwards hold the samples ``parts``."""
    lengths = [len(x) for x in layers[0].logits]
    tokens, documents = sum(lengths), len(lengths)
    balance = z_loss = torch.zeros((), dtype=torch.float64)
    for layer in layers:
        experts = layer.logits[0].shape[-1]
        for part in parts:
            for member in part:
                group = part if objective.grouping == "pack" else [member]
                ids = [e for m in group for row in layer.chosen[m].tolist() for e in row]
                assert len(ids) == top_k * sum(lengths[m] for m in group)
                for row in layer.logits[member]:
                    p = torch.softmax(row, -1)
                    by_document = documents * lengths[member]
                    w = 1 / (tokens if objective.reduction == "token" else by_document)
                    z_w = 1 / (tokens if objective.z_reduction == "token" else by_document)
                    for expert in range(experts):
                        share = ids.count(expert) / len(ids)
                        balance = balance + experts * w * share * p[expert]
                    z_loss = z_loss + z_w * torch.log(torch.exp(row).sum()) ** 2
    return balance * objective.load_balancing_weight, z_loss * objective.router_z_weight
