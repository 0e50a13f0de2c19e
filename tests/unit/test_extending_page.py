"""The code of ``docs/extending.md``: a verifier, the beginning of an engine, how it is started."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from documents import ROOT, blocks

from activities.storage import layout
from activities.storage.store import Store
from activities.verifiers.registry import REGISTRY, VerifierSet
from activities.wire.probe import EngineProbe
from configs.load import load_run
from models.ids import RunRef
from models.prompt import PreparedPrompt, PromptMetadata, VerifierTarget
from models.sample import VerdictOutcome
from workers.actors.engine import Served
from workers.actors.order import ActorOrder
from workers.preflight.engine import INFORMATION, examine
from workers.preflight.engine_generation import GENERATION
from workers.preflight.engine_refusals import REFUSALS

SCORE, INVALID = VerdictOutcome.SCORE, VerdictOutcome.INVALID


def code(number: int) -> dict[str, Any]:
    """What the n-th Python block of the page defines."""
    names: dict[str, Any] = {"__name__": "documented"}
    block = blocks(ROOT / "docs" / "extending.md", "python")[number]
    exec(compile(block, f"extending.md block {number}", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("answer", "outcome", "value"),
    [
        ("it is PARIS.", SCORE, 1.0),
        ("paris", SCORE, 1.0),
        ("Pari s", SCORE, 0.0),
        (" \n", INVALID, 0.0),
        ("x" * 1_000_000, SCORE, 0.0),
        ("\0\ud800 paris", SCORE, 1.0),
    ],
)
async def test_the_verifier_scores(answer: str, outcome: VerdictOutcome, value: float) -> None:
    verifiers = VerifierSet({**REGISTRY, "contains": code(0)["ContainsVerifier"]})
    target = VerifierTarget(name="contains", target="Paris")
    metadata = PromptMetadata(
        prepared_sample_id="t:train:0",
        source_dataset="t",
        source_row=0,
        query="",
        verifiers=(target,),
        run_prompt_tokens=1,
        run_prompt_token_ids_sha256="",
    )
    prompt = PreparedPrompt(input="", label="", prompt_token_ids=(1,), metadata=metadata)
    (verdict,) = await verifiers.score(prompt, answer)
    assert (verdict.outcome, verdict.score) == (outcome, value)
    await verifiers.aclose()


async def test_the_engine_passes_the_checks_of_what_it_answers() -> None:
    transport = httpx.ASGITransport(code(1)["app"])
    probe = EngineProbe("http://mine", timeout_s=10, transport=transport)
    try:
        report = await examine(probe, (*INFORMATION, *GENERATION, *REFUSALS))
    finally:
        await probe.aclose()
    passed = {finding.check for finding in report.findings if finding.ok}
    assert passed == {*(check.name for check in INFORMATION), "unknown path"}
    assert report.failed > 10


def test_the_engine_is_started_with_what_the_page_says(tmp_path: Path) -> None:
    loaded = load_run(ROOT / "configs/recipes/tiny-ci.toml", [f'output.root="{tmp_path}"'])
    Store(tmp_path).write_json(layout.RESOLVED_CONFIG, loaded.document)
    run = RunRef(run_id="train/x", root=str(tmp_path), spec_sha256=loaded.sha256)
    order = ActorOrder(run=run, role="engine", scratch=str(tmp_path))
    command = code(2)["_mine"](order, loaded.spec, Served(tmp_path, False, None))
    words = command.argv
    assert words[words.index("-m") + 1] == "workers.engines.mine"
    assert words[words.index("--dtype") + 1] == "float32"
    assert {"--host", "--port", "--ready-file", "--model-path"} < set(words)
