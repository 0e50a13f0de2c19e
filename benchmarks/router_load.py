"""What reporting the router load costs: updates of a mixture of experts with and without it.

    python benchmarks/router_load.py [--rounds 9] [--threads 1]

Two trainers of the same random Qwen3-MoE take the same updates by turns, so that both meet the same
load of the machine. One of them has lost the hooks on its routers and the event. Two figures are
printed for each size, in CPU time: the ratio of the medians, and, because that is smaller than the
noise of most machines, the time that is spent inside the hooks and the event, over that of the
whole update.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers

from configs.run import RunSpec
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan
from workers.sources.characters import character_tokenizer
from workers.trainers import local
from workers.trainers.local import LocalTrainer
from workers.trainers.routers import find_routers

SIZES: dict[str, dict[str, int]] = {
    "tiny-moe": {"hidden_size": 96, "num_hidden_layers": 2, "num_experts": 8, "top_k": 2},
    "wide": {"hidden_size": 256, "num_hidden_layers": 4, "num_experts": 32, "top_k": 4},
}
GROUPS, SIBLINGS, PROMPT, RESPONSE = 8, 8, 24, 16
VOCABULARY = 100


class Meter:
    """CPU seconds of the calling thread inside wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, metered."""

        def metered(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started

        return metered


def main() -> None:
    """Measure every size and print a line for each, then one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="updates of each trainer")
    parser.add_argument("--threads", type=int, default=1)
    told = parser.parse_args()
    rows = []
    for name, sizes in SIZES.items():
        with tempfile.TemporaryDirectory() as work:
            rows.append({"size": name, **measure(Path(work), sizes, told.rounds, told.threads)})
        print(
            "{size}: update {update_s:.3f} s, without {without_s:.3f} s, ratio {ratio:.4f}; "
            "inside hooks and event {inside:.3%} of the update".format(**rows[-1])
        )
    print(json.dumps({"torch": torch.__version__, "rounds": told.rounds, "rows": rows}))


def measure(work: Path, sizes: dict[str, int], rounds: int, threads: int) -> dict[str, float]:
    """Median CPU seconds of an update with and without the report, and the share inside it."""
    folder = write_model(work / "model", sizes)
    meter = Meter()
    local.record_load = meter.over(local.record_load)  # type: ignore[assignment]
    trainers = {kind: LocalTrainer(spec(work / kind, threads), folder) for kind in ("on", "off")}
    for router in find_routers(trainers["on"].model):
        hooks = router.module._forward_hooks
        for key, hook in hooks.items():
            hooks[key] = meter.over(hook)
    for router in find_routers(trainers["off"].model):
        router.module._forward_hooks.clear()
    trainers["off"]._routing.names = ()
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    inside: list[float] = []
    for index in range(rounds + 1):
        groups = make_groups(index)
        for kind, trainer in trainers.items():
            meter.seconds = 0.0
            started = time.process_time()
            report = trainer.optimize(index, f"{index}", groups)
            spent = time.process_time() - started
            assert ("train/moe/load_cv_max" in report.metrics) is (kind == "on")
            if index:  # the first one warms up
                seconds[kind].append(spent)
                inside += [meter.seconds / spent] if kind == "on" else []
    with_it, without = (statistics.median(seconds[kind]) for kind in ("on", "off"))
    return {
        "update_s": with_it,
        "without_s": without,
        "ratio": with_it / without,
        "inside": statistics.median(inside),
    }


def write_model(folder: Path, sizes: dict[str, int]) -> Path:
    """A random Qwen3-MoE."""
    torch.manual_seed(0)
    width = sizes["hidden_size"]
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        num_experts=sizes["num_experts"],
        num_experts_per_tok=sizes["top_k"],
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=128,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def spec(root: Path, threads: int) -> RunSpec:
    """One optimizer step an update; samples of any age."""
    return RunSpec.model_validate(
        {
            "schema_version": 1,
            "name": "router-load",
            "model": {"source": "local"},
            "data": {"prompt_data": "none.jsonl"},
            "output": {"root": str(root)},
            "training": {"rollout_batch_size": GROUPS, "samples_per_prompt": SIBLINGS},
            "core": {"max_policy_lag": 1000, "max_context_length": PROMPT + RESPONSE},
            "trainer": {"num_threads": threads},
            "inference": {"dtype": "float32"},
        }
    )


def make_groups(seed: int) -> list[SampleGroup]:
    """Random samples of one length, half of them rewarded."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(4, VOCABULARY) for _ in range(count)]

    groups = []
    for g in range(GROUPS):
        prompt = tokens(PROMPT)
        samples = [
            Sample(
                sample_index=s,
                group_index=g,
                prompt_token_ids=prompt,
                response_token_ids=tokens(RESPONSE),
                logprobs=[-4.6] * RESPONSE,
                spans=[TokenSpan(0, 0, RESPONSE)],
                finish_reason=FinishReason.STOP,
            )
            for s in range(SIBLINGS)
        ]
        groups.append(SampleGroup(g, f"p{g}", 0, samples, [0.5, -0.5] * (SIBLINGS // 2)))
    return groups


if __name__ == "__main__":
    main()
