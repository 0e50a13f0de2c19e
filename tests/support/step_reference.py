"""Loss and gradient of an optimizer step in the plainest way, and layouts to compare with it.

Every sequence in one padded batch with the model's own forward, each formula written out, in
float64, differentiated by autograd.
"""

import torch

from models.sample import SampleGroup
from workers.trainers.batch import rows_of
from workers.trainers.packing import Response, Row, collate


def spread(groups: list[SampleGroup]) -> list[SampleGroup]:
    """Log-probs at sampling time near those of the model's, so that no weight is truncated away."""
    generator = torch.Generator().manual_seed(5)
    for group in groups:
        for sample in group.samples:
            noise = torch.rand(len(sample.logprobs), generator=generator, dtype=torch.float64)
            sample.logprobs = (-4.0 - 2.0 * noise).tolist()
    return groups


class Reference:
    """All sequences [S, P + T] right-padded, response tokens [S, T] with a mask."""

    def __init__(self, groups, model):
        samples = [(s, a) for g in groups for s, a in zip(g.samples, g.advantages, strict=True)]
        width = max(len(s.prompt_token_ids) + len(s.response_token_ids) for s, _ in samples)
        length = max(len(s.response_token_ids) for s, _ in samples)
        self.ids = torch.zeros(len(samples), width, dtype=torch.long)
        self.attention = torch.zeros(len(samples), width, dtype=torch.long)
        self.mask = torch.zeros(len(samples), length, dtype=torch.bool)
        self.active = torch.zeros(len(samples), length, dtype=torch.bool)
        self.place = torch.zeros(len(samples), length, dtype=torch.long)
        for row, (sample, _) in enumerate(samples):
            ids = sample.prompt_token_ids + sample.response_token_ids
            self.ids[row, : len(ids)] = torch.tensor(ids)
            self.attention[row, : len(ids)] = 1
            count = len(sample.response_token_ids)
            self.mask[row, :count] = True
            own = sample.loss_mask or [1] * count
            self.active[row, :count] = torch.tensor(own, dtype=torch.bool)
            begin = len(sample.prompt_token_ids) - 1
            self.place[row, :count] = torch.arange(begin, begin + count)
        self.behavior = self.padded([x for s, _ in samples for x in s.logprobs])
        self.advantages = torch.tensor([a for _, a in samples], dtype=torch.float64)[:, None]
        self.model = model

    def padded(self, values):
        """Flat response tokens -> [S, T]."""
        flat = torch.as_tensor(values, dtype=torch.float64)
        return torch.zeros(self.mask.shape, dtype=torch.float64).masked_scatter(self.mask, flat)

    def score(self, model, temperature=1.0):
        logits = model(input_ids=self.ids, attention_mask=self.attention).logits / temperature
        rows = torch.arange(len(self.ids))[:, None]
        log_p = torch.log_softmax(logits, -1)[rows, self.place]
        targets = self.ids[rows, self.place + 1]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, targets[..., None])[..., 0], entropy

    def loss(self, settings, aggregation, old, frozen, temperature=1.0):
        new, entropy = self.score(self.model, temperature)
        old = new.detach() if old is None else self.padded(old)
        counts = self.active.sum(1, keepdim=True).clamp(min=1)
        log_ratio = new - old
        if settings.sequence_ratio:
            log_ratio = ((log_ratio * self.active).sum(1, keepdim=True) / counts).expand_as(new)
        ratio = log_ratio.clamp(-20, 20).exp()
        low, high = 1 - settings.eps_clip, 1 + settings.eps_clip_high
        gain = torch.minimum(ratio * self.advantages, ratio.clamp(low, high) * self.advantages)
        if settings.eps_clip_c is not None:
            floor = torch.maximum(gain, settings.eps_clip_c * self.advantages)
            gain = torch.where(self.advantages < 0, floor, gain)
        token = -gain
        if settings.use_tis:
            weight = (old - self.behavior).exp().clamp(settings.tis_clip_low, settings.tis_clip)
            token = token * weight
        token = token - settings.entropy_coef * entropy
        if settings.kl_coef:
            d = new - self.score(frozen, temperature)[0].detach()
            token = token + settings.kl_coef * (torch.exp(-d) - 1 + d)
        token = torch.where(self.active, token, 0.0)
        if aggregation == "response":
            return (token.sum(1, keepdim=True) / counts).mean()
        return token.sum() / counts.sum()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def chunks(members, count):
    return [list(part) for part in torch.tensor(members).chunk(count)]


def layout(batch, members, packed):
    members = [int(member) for member in members]
    if packed:
        return collate(rows_of(batch, members))
    samples = [batch.samples[member] for member in members]
    return collate([Row(s.prompt_ids, (Response(s.response_ids, s.offset),)) for s in samples])
