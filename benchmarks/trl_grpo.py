"""A run file trained by TRL's GRPOTrainer: what ``trl_comparison.py`` sets beside Perdure.

    python benchmarks/trl_grpo.py RUN.toml --prepared RUN_ROOT/prepared --out trl.json

Takes the settings of a run file, the model folder and the prompts that Perdure prepared, and
Perdure's own verifiers as the reward function. What an update is on both sides: as many prompts,
samples of each, new tokens, optimizer steps; AdamW with the same numbers; advantages, clipping and
aggregation of the loss as the run file says; weights in float32, products in the run file's dtype.
Prompts are refused unless TRL's tokens are Perdure's.

TRL's own advice for speed is a vLLM server, which needs another torch than the one that runs here.
What is left is ``--generation``: ``generate`` (transformers' batch generation, TRL's default) or
``continuous`` (transformers' continuous batching). Gradient checkpointing is off, the optimizer
fused, and the micro-batch as large as asked for: by default a whole optimizer step.
"""

import argparse
import asyncio
import json
import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from activities.verifiers.base import total_reward
from activities.verifiers.registry import build_verifiers
from configs.load import load_run
from configs.run import RunSpec
from models.prompt import PreparedPrompt

TRAIN = Path("data") / "train.jsonl"
MODEL = "hf"


@dataclass(slots=True)
class Measured:
    """What the trainer did, update by update; seconds of the monotonic clock."""

    steps_per_update: int
    begun: float = 0.0
    ends: list[float] = field(default_factory=list)
    """Of optimizer steps."""
    sampling: list[float] = field(default_factory=list)
    scoring: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def updates(self) -> list[dict[str, float]]:
        """A row for each update."""
        ends = [self.begun, *self.ends[self.steps_per_update - 1 :: self.steps_per_update]]
        rows = zip(self.sampling, self.scoring, self.rewards, self.tokens, strict=True)
        return [
            {
                "seconds": ends[place + 1] - ends[place],
                "rollout_seconds": sampling,
                "reward_seconds": scoring,
                "reward": reward,
                "response_tokens": tokens,
            }
            for place, (sampling, scoring, reward, tokens) in enumerate(rows)
        ]


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Notes when optimizer steps end."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first update begins."""
        self._measured.begun = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """An optimizer step is done, on the GPU as well."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._measured.ends.append(time.monotonic())


def read_prompts(folder: Path) -> list[PreparedPrompt]:
    """Rows of the prepared training file."""
    text = (folder / TRAIN).read_text()
    return [PreparedPrompt.model_validate_json(line) for line in text.splitlines()]


def require_same_tokens(prompts: Sequence[PreparedPrompt], tokenizer: Any) -> None:
    """End unless the tokenizer makes of each text what Perdure made of it."""
    made = tokenizer(text=[prompt.input for prompt in prompts])["input_ids"]
    for prompt, ids in zip(prompts, made, strict=True):
        if tuple(ids) != prompt.prompt_token_ids:
            name = prompt.metadata.prepared_sample_id
            raise SystemExit(f"TRL would tokenize {name} otherwise: {ids[:8]} ...")


def reward_function(
    prompts: Sequence[PreparedPrompt], measured: Measured
) -> Callable[..., list[float]]:
    """The run's verifiers as TRL calls them: once for all samples of an update."""
    verifiers = build_verifiers()
    loop = asyncio.new_event_loop()  # one for all updates: a verifier's process belongs to it

    async def score(rows: Sequence[int], completions: Sequence[str]) -> list[float]:
        told = [
            await verifiers.score(prompts[row], text)
            for row, text in zip(rows, completions, strict=True)
        ]
        return [total_reward(verdicts) for verdicts in told]

    def reward(completions: Sequence[str], row: Sequence[int], **_: Any) -> list[float]:
        begun = time.monotonic()
        rewards = loop.run_until_complete(score(row, completions))
        if not all(map(math.isfinite, rewards)):
            raise SystemExit("a verifier failed")
        measured.scoring.append(time.monotonic() - begun)
        measured.rewards.append(sum(rewards) / len(rewards))
        return rewards

    return reward


def settings(spec: RunSpec, told: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``GRPOConfig`` for the run file."""
    training, optimizer, inference = spec.training, spec.optimizer, spec.inference
    micro = told.micro_batch or spec.samples_per_step
    if spec.samples_per_step % micro:
        raise SystemExit(f"--micro-batch {micro} does not divide {spec.samples_per_step} samples")
    if optimizer.lr_schedule != "constant" or training.advantage_estimator != "grpo":
        raise SystemExit("compared are a constant learning rate and advantage_estimator grpo")
    top_k = inference.top_k if inference.top_k > 0 else 0
    return {
        "num_generations": training.samples_per_prompt,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": spec.samples_per_step // micro,
        "steps_per_generation": spec.samples_per_collection // micro,
        "max_steps": training.num_rollouts * spec.steps_per_update,
        "max_completion_length": inference.max_response_length,
        **{"temperature": inference.temperature, "top_p": inference.top_p, "top_k": top_k},
        "loss_type": "dapo" if training.loss_aggregation == "token" else "grpo",
        "scale_rewards": "group" if training.grpo_std_normalization else "none",
        **{"epsilon": training.eps_clip, "epsilon_high": training.eps_clip_high},
        **{"beta": 0.0, "num_iterations": 1},
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optimizer.lr_warmup_steps,
        **{"adam_beta1": optimizer.adam_beta1, "adam_beta2": optimizer.adam_beta2},
        **{"adam_epsilon": optimizer.adam_eps, "weight_decay": optimizer.weight_decay},
        **{"max_grad_norm": optimizer.clip_grad, "optim": "adamw_torch_fused"},
        "bf16": spec.trainer.compute_dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "use_transformers_continuous_batching": told.generation == "continuous",
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        **{"seed": spec.data.seed, "shuffle_dataset": spec.data.shuffle},
        **{"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
        "output_dir": str(told.out.with_suffix("")),
    }


def time_sampling(trainer: Any, measured: Measured) -> None:
    """Time each generation of ``trainer`` and count its tokens."""
    generate = trainer._generate_single_turn

    def timed(*given: Any, **named: Any) -> Any:
        begun = time.monotonic()
        answer = generate(*given, **named)
        measured.sampling.append(time.monotonic() - begun)
        measured.tokens.append(sum(len(ids) for ids in answer[0]))
        return answer

    trainer._generate_single_turn = timed


def train(spec: RunSpec, told: argparse.Namespace) -> dict[str, Any]:
    """The whole training and what was measured."""
    begun = time.monotonic()
    prompts = read_prompts(told.prepared)
    tokenizer = AutoTokenizer.from_pretrained(told.prepared / MODEL, padding_side="left")
    require_same_tokens(prompts, tokenizer)
    measured = Measured(spec.steps_per_update)
    chosen = settings(spec, told)
    trainer = GRPOTrainer(
        model=str(told.prepared / MODEL),
        reward_funcs=reward_function(prompts, measured),
        args=GRPOConfig(**chosen),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt.input, "row": row} for row, prompt in enumerate(prompts)]
        ),
        processing_class=tokenizer,
        callbacks=[Clock(measured)],
    )
    time_sampling(trainer, measured)
    startup = time.monotonic() - begun
    trainer.train()
    return {
        "generation": told.generation,
        **{name: version(name) for name in ("trl", "transformers", "torch", "accelerate")},
        "settings": {name: value for name, value in chosen.items() if name != "output_dir"},
        "weights_at_the_end": str(next(trainer.model.parameters()).dtype),
        "startup_seconds": startup,
        "total_seconds": time.monotonic() - begun,
        "peak_gib": peak_gib(),
        "updates": measured.updates(),
    }


def peak_gib() -> float:
    """Largest allocation on the GPU so far, without one the largest resident size; GiB."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Parse the command line, train, write the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_file")
    parser.add_argument("--prepared", type=Path, required=True, help="a run's prepared/ folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--generation", choices=["generate", "continuous"], default="generate")
    parser.add_argument("--micro-batch", type=int, default=0, help="samples; 0: an optimizer step")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    result = train(load_run(told.run_file, told.set).spec, told)
    told.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
