"""A plain GRPO loop in one process: what the quick start costs without any durability.

No Temporal, no Ray, no engine process, no files in between. It takes the settings of a run file and
the prompts that Perdure prepared, and does the same arithmetic in the most direct way that is also
fast: each prompt is prefilled once and its cache repeated for its samples, each prompt is computed
once per group in the packed training row, float32 master weights with a bfloat16 sampler copy.

    python benchmarks/reference_loop.py RUN.toml --prepared RUN_ROOT/prepared --out loop.json
"""

import argparse
import json
import os
import re
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar

from configs.load import load_run
from configs.run import RunSpec

Model = Any  # a transformers causal language model; its classes are typed as Any


@dataclass
class Prompts:
    """N prompts, left-padded to P tokens."""

    ids: torch.Tensor  # [N, P]
    mask: torch.Tensor  # [N, P], 1 where a token is
    labels: list[str]

    def select(self, rows: torch.Tensor) -> "Prompts":
        """The prompts at these rows."""
        return Prompts(self.ids[rows], self.mask[rows], [self.labels[i] for i in rows.tolist()])


@dataclass
class Responses:
    """B = N * G responses of at most T tokens, siblings next to each other."""

    tokens: torch.Tensor  # [B, T]
    logprobs: torch.Tensor  # [B, T], behavior log-probs
    mask: torch.Tensor  # [B, T], True up to and including the stop token


def read_prompts(path: Path, pad_id: int) -> Prompts:
    """Read a prepared JSONL file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    width = max(len(row["prompt_token_ids"]) for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        tokens = torch.tensor(row["prompt_token_ids"])
        ids[index, width - len(tokens) :] = tokens
        mask[index, width - len(tokens) :] = 1
    return Prompts(ids, mask, [str(row["label"]) for row in rows])


@torch.no_grad()
def sample(
    model: Model, prompts: Prompts, num_samples: int, max_tokens: int, temperature: float, eos: int
) -> Responses:
    """Sample ``num_samples`` responses a prompt; temperature 0 is greedy."""
    positions = (prompts.mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    out = model(
        input_ids=prompts.ids, attention_mask=prompts.mask, position_ids=positions,
        past_key_values=cache, logits_to_keep=1,
    )  # fmt: skip
    cache.batch_repeat_interleave(num_samples)
    logits = out.logits[:, -1].repeat_interleave(num_samples, 0)  # [B, V]
    mask = prompts.mask.repeat_interleave(num_samples, 0)
    alive = torch.ones(len(logits), dtype=torch.bool)
    tokens, logprobs, alive_at = [], [], []
    for step in range(max_tokens):
        scores = F.log_softmax(logits.float() / (temperature or 1.0), -1)
        chosen = torch.multinomial(scores.exp(), 1)[:, 0] if temperature else scores.argmax(-1)
        tokens.append(chosen)
        logprobs.append(scores.gather(-1, chosen[:, None])[:, 0])
        alive_at.append(alive)
        alive = alive & (chosen != eos)
        if step == max_tokens - 1 or not alive.any():
            break
        mask = F.pad(mask, (0, 1), value=1)
        out = model(
            input_ids=chosen[:, None], attention_mask=mask,
            position_ids=mask.sum(-1, keepdim=True) - 1, past_key_values=cache, logits_to_keep=1,
        )  # fmt: skip
        logits = out.logits[:, -1]
    return Responses(torch.stack(tokens, 1), torch.stack(logprobs, 1), torch.stack(alive_at, 1))


def packed_logprobs(
    model: Model, prompts: Prompts, responses: torch.Tensor, group: int, temperature: float
) -> torch.Tensor:
    """Log-probs [N * G, T] of ``responses`` from rows [prompt, response 1 ... response G].

    A response sees its prompt and itself only; its positions follow the prompt's.
    """
    num_prompts, width = prompts.ids.shape
    length = responses.shape[1]
    row = torch.cat([prompts.ids, responses.view(num_prompts, group * length)], 1)  # [N, S]
    after = prompts.mask.sum(-1, keepdim=True) + torch.arange(length)  # [N, T]
    positions = torch.cat([(prompts.mask.cumsum(-1) - 1).clamp(min=0), after.repeat(1, group)], 1)
    owner = torch.cat(
        [torch.full((width,), -1), torch.arange(group).repeat_interleave(length)]
    )  # [S], -1: the prompt
    size = row.shape[1]
    sees = torch.ones(size, size, dtype=torch.bool).tril()
    sees &= (owner[None] == -1) | (owner[None] == owner[:, None])
    real = F.pad(prompts.mask.bool(), (0, group * length), value=True)  # [N, S]
    sees = (sees[None] & real[:, None]) | torch.eye(size, dtype=torch.bool)  # padding sees itself
    dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
    bias = torch.zeros(num_prompts, 1, size, size, dtype=dtype)
    bias.masked_fill_(~sees[:, None], torch.finfo(dtype).min)
    hidden = model.model(
        input_ids=row, attention_mask=bias, position_ids=positions, use_cache=False
    ).last_hidden_state
    inside = hidden[:, width:].reshape(num_prompts, group, length, -1)
    before = hidden[:, None, width - 1 : width].expand(-1, group, -1, -1)  # [N, G, 1, H]
    states = torch.cat([before, inside[:, :, :-1]], 2).flatten(0, 1)  # [N * G, T, H]
    logits = model.lm_head(states).float() / temperature
    return F.log_softmax(logits, -1).gather(-1, responses[..., None])[..., 0]


def last_number_scores(texts: list[str], labels: list[str]) -> torch.Tensor:
    """1.0 where the last integer of the text is the label."""
    found = [re.findall(r"-?\d+", text.replace(",", "")) for text in texts]
    return torch.tensor(
        [float(bool(n) and n[-1] == label) for n, label in zip(found, labels, strict=True)]
    )


class ReferenceLoop:
    """Model, sampler copy and optimizer of one run."""

    def __init__(self, spec: RunSpec, prepared: Path) -> None:
        self.spec = spec
        torch.manual_seed(spec.data.seed)
        folder = prepared / "hf"
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=spec.trainer.attention
        )
        self.sampler = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, spec.inference.dtype),
            attn_implementation=spec.trainer.attention,
        ).eval()  # fmt: skip
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.eos = self.tokenizer.eos_token_id
        self.train = read_prompts(prepared / "data" / "train.jsonl", self.eos)
        self.held_out = read_prompts(prepared / "data" / "eval.jsonl", self.eos)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=spec.optimizer.learning_rate,
            betas=(spec.optimizer.adam_beta1, spec.optimizer.adam_beta2),
            eps=spec.optimizer.adam_eps,
            weight_decay=spec.optimizer.weight_decay,
        )

    def texts(self, responses: Responses) -> list[str]:
        """The responses as text, without what follows the stop token."""
        return [
            self.tokenizer.decode(tokens[keep], skip_special_tokens=True)
            for tokens, keep in zip(responses.tokens, responses.mask, strict=True)
        ]

    def evaluate(self) -> float:
        """Mean reward on the held-out prompts."""
        evaluation, inference = self.spec.evaluation, self.spec.inference
        samples = evaluation.samples_per_prompt
        limit = evaluation.max_response_length or inference.max_response_length
        responses = sample(
            self.sampler, self.held_out, samples, limit, evaluation.temperature, self.eos
        )
        labels = [label for label in self.held_out.labels for _ in range(samples)]
        return last_number_scores(self.texts(responses), labels).mean().item()

    def update(self, index: int) -> dict[str, float]:
        """One collection, one optimizer step, one copy of the weights into the sampler."""
        training, inference = self.spec.training, self.spec.inference
        group = training.samples_per_prompt
        started = time.monotonic()
        prompts = self.train.select(
            torch.randperm(len(self.train.labels))[: training.rollout_batch_size]
        )
        responses = sample(
            self.sampler, prompts, group, inference.max_response_length, inference.temperature,
            self.eos,
        )  # fmt: skip
        labels = [label for label in prompts.labels for _ in range(group)]
        rewards = last_number_scores(self.texts(responses), labels).view(-1, group)
        sampled = time.monotonic()
        self._optimize(index, prompts, responses, rewards)
        trained = time.monotonic()
        with torch.no_grad():
            for copy, master in zip(
                self.sampler.parameters(), self.model.parameters(), strict=True
            ):
                copy.copy_(master)
        return {
            "update": index,
            "reward": rewards.mean().item(),
            "rollout_seconds": sampled - started,
            "train_seconds": trained - sampled,
            "publish_seconds": time.monotonic() - trained,
            "seconds": time.monotonic() - started,
        }

    def _optimize(
        self, index: int, prompts: Prompts, responses: Responses, rewards: torch.Tensor
    ) -> None:
        """PPO-clip with truncated importance weights, mean over all response tokens."""
        training, optimizer = self.spec.training, self.spec.optimizer
        group = rewards.shape[1]
        advantages = rewards - rewards.mean(1, keepdim=True)  # [N, G]
        mixed = (advantages != 0).any(1).nonzero()[:, 0]
        num_tokens = responses.mask.sum()
        row_tokens = prompts.ids.shape[1] + group * responses.tokens.shape[1]
        rows = max(1, self.spec.trainer.micro_batch_tokens // row_tokens)
        peak, first = optimizer.learning_rate, optimizer.lr_warmup_init
        done = min(1.0, index / optimizer.lr_warmup_steps) if optimizer.lr_warmup_steps else 1.0
        for settings in self.optimizer.param_groups:
            settings["lr"] = first + (peak - first) * done
        self.optimizer.zero_grad(set_to_none=True)
        for chunk in mixed.split(rows) if len(mixed) else ():
            members = (chunk[:, None] * group + torch.arange(group)).flatten()
            with torch.autocast(
                "cpu", torch.bfloat16, enabled=self.spec.trainer.compute_dtype == "bfloat16"
            ):
                logprobs = packed_logprobs(
                    self.model, prompts.select(chunk), responses.tokens[members], group,
                    self.spec.inference.temperature,
                )  # fmt: skip
            old = logprobs.detach()
            weights = (old - responses.logprobs[members]).exp().clamp(max=training.tis_clip)
            ratio = (logprobs - old).exp()
            clipped = ratio.clamp(1 - training.eps_clip, 1 + training.eps_clip_high)
            gain = advantages.flatten()[members, None]
            surrogate = weights * torch.minimum(ratio * gain, clipped * gain)
            (-(surrogate * responses.mask[members]).sum() / num_tokens).backward()
        if len(mixed):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), optimizer.clip_grad)
            self.optimizer.step()


def run(spec: RunSpec, prepared: Path) -> dict[str, Any]:
    """The whole loop with the evaluations that the run file asks for."""
    started = time.monotonic()
    loop = ReferenceLoop(spec, prepared)
    startup = time.monotonic() - started
    updates: list[dict[str, float]] = []
    evaluations = []
    total = spec.training.num_rollouts
    for done in range(total + 1):
        periodic = done > 0 and spec.evaluation.interval and done % spec.evaluation.interval == 0
        if done in (0, total) or periodic:
            begun = time.monotonic()
            reward = loop.evaluate()
            seconds = time.monotonic() - begun
            evaluations.append({"update": done, "reward": reward, "seconds": seconds})
        if done < total:
            updates.append(loop.update(done))
            print(json.dumps(updates[-1]), flush=True)
    return {
        "startup_seconds": startup,
        "total_seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time(),
        "updates": updates,
        "evaluations": evaluations,
    }


def main() -> None:
    """Parse the command line, run, write the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run_file")
    parser.add_argument("--prepared", type=Path, required=True, help="a run's prepared/ folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    # The argument is called `cache` from transformers 5.24 on; older ones do not know that name.
    warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
    measured = run(load_run(arguments.run_file, arguments.set).spec, arguments.prepared)
    measured["threads"] = arguments.threads
    arguments.out.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
