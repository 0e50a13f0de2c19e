"""Whether engine and trainer give the same tokens the same log-probs, before a run relies on it.

An engine is started as the run would start it, answers a few prompts, and the trainer scores what
it sampled. Other weights, another temperature, a shifted position or a head that was never loaded
show as a mean gap above a tenth of a nat; rounding in bfloat16 stays below half of that.
"""

import asyncio
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from activities.wire.client import EngineClient
from activities.wire.contract import GenerateRequest, SamplingParams
from configs.run import RunSpec
from models.errors import ConfigurationError
from models.ids import RunRef
from workers.actors.engine import server_command
from workers.actors.order import ActorOrder, fleet_token
from workers.engines.process import ServerProcess
from workers.sources.model import describe_model

QUESTIONS = (
    "What is 3 * 4?",
    "Name a color.",
    "Write one sentence about the sea.",
    "What is 17 + 25?",
    "Spell the word tree backward.",
    "Which is larger, 9 or 11?",
    "Say hello in French.",
    "List three animals.",
)
MAX_NEW_TOKENS = 64
"""Of each answer; fewer where the run allows fewer."""
REQUEST_TIMEOUT_S = 120.0
STOP_GRACE_S = 10.0


class Answer(NamedTuple):
    """What the engine sampled for one prompt, and the log-prob that it gave to every token."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


def measure_agreement(argument: dict[str, Any]) -> dict[str, Any]:
    """Sample, score and compare.

    Args:
        argument: ``spec`` (a resolved run file) and ``folder`` (the model).

    Returns:
        ``tokens``; mean, 99th percentile and maximum of |trainer - engine| in nats; ``device``.

    Raises:
        ConfigurationError: engine or trainer refuse the model.
        EngineLost: the engine did not start.
    """
    # JSON mode, because strict Python mode refuses the lists that JSON has for tuples.
    spec = RunSpec.model_validate_json(json.dumps(argument["spec"]))
    folder = Path(argument["folder"])
    answers = asyncio.run(_sampled(spec, folder))
    scored, device = _scored(spec, folder, answers)
    gaps = sorted(
        abs(mine - theirs)
        for answer, row in zip(answers, scored, strict=True)
        for mine, theirs in zip(row, answer.logprobs, strict=True)
    )
    if not all(map(math.isfinite, gaps)):
        raise ConfigurationError("a log-prob is not finite")
    return {
        "tokens": len(gaps),
        "mean": sum(gaps) / len(gaps),
        "p99": gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
        "max": gaps[-1],
        "device": device,
    }


async def _sampled(spec: RunSpec, folder: Path) -> list[Answer]:
    """Start an engine, ask it every question, stop it."""
    with tempfile.TemporaryDirectory(prefix="perdure-doctor-") as scratch:
        gpus = tuple(str(n) for n in range(spec.inference.tensor_parallel_size))
        order = ActorOrder(
            run=RunRef(run_id="doctor", root=scratch, spec_sha256=""),
            role="engine",
            scratch=scratch,
            gpus=() if spec.placement.mode == "cpu" else gpus,
            engine_token=fleet_token(),
        )
        command = server_command(order, spec, folder, 0)
        server = await ServerProcess.start(command, spec.inference.start_timeout_s)
        client = EngineClient(
            server.url,
            vocab_size=describe_model(folder).vocab_size,
            context_length=spec.core.max_context_length,
        )
        try:
            prompts = _prompts(spec, folder)
            return list(await asyncio.gather(*(_ask(client, spec, ids) for ids in prompts)))
        finally:
            await client.aclose()
            await server.stop(STOP_GRACE_S)


async def _ask(client: EngineClient, spec: RunSpec, prompt: list[int]) -> Answer:
    # With top_p or top_k the engine still tells log-probs of the whole distribution.
    sampling = SamplingParams(temperature=spec.inference.temperature, max_new_tokens=_new(spec))
    request = GenerateRequest(rid=uuid4().hex, input_ids=prompt, sampling_params=sampling)
    answer = await client.generate(request, timeout_s=REQUEST_TIMEOUT_S)
    entries = answer.meta_info.output_token_logprobs or []
    return Answer(prompt, answer.output_ids, [entry[0] for entry in entries])


def _prompts(spec: RunSpec, folder: Path) -> list[list[int]]:
    """Token ids of the questions, in the model's own template."""
    from workers.sources.rendering import PromptRenderer
    from workers.sources.rows import SourceRow

    rows = [
        SourceRow("doctor", n, f"question {n + 1}", ({"role": "user", "content": text},), "", "")
        for n, text in enumerate(QUESTIONS)
    ]
    prepared = PromptRenderer(folder).prepare(
        "eval", rows, spec.core.max_context_length, _new(spec)
    )
    return [list(prompt.prompt_token_ids) for prompt in prepared]


def _scored(
    spec: RunSpec, folder: Path, answers: Sequence[Answer]
) -> tuple[list[list[float]], str]:
    """Log-probs of every answer by the trainer's own forward, and the device that it ran on."""
    if spec.placement.mode == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from workers.trainers.documents import Document, collate_documents
    from workers.trainers.load import load_policy, scorer_of
    from workers.trainers.packing import Response, Row, collate
    from workers.trainers.row_layout import prepare_packing

    model = load_policy(spec, folder)
    packing, scorer = prepare_packing(spec, model), scorer_of(spec, model)
    rows = []
    for answer in answers:
        if packing == "documents":
            batch = collate_documents([Document(answer.prompt, answer.ids, 0)])
        else:
            batch = collate([Row(answer.prompt, (Response(answer.ids, 0),))])
        logprobs, _ = scorer.score(batch)
        rows.append(logprobs.cpu()[torch.argsort(batch.token_index)].tolist())
    return rows, str(next(model.parameters()).device)


def _new(spec: RunSpec) -> int:
    return min(MAX_NEW_TOKENS, spec.inference.max_response_length)
