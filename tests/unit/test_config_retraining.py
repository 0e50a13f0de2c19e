"""What a retraining accepts, and what a firing makes of its run file."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from configs.retraining import CHANGED, request_sha256, require_usable, run_of_firing
from models.errors import ConfigurationError
from models.retraining import RetrainingRequest
from tests.support.retraining_rig import RetrainingDesk


@pytest.fixture
def desk(tmp_path: Path) -> RetrainingDesk:
    return RetrainingDesk(tmp_path, "weekly", "local")


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= flat(each, f"{prefix}.{key}" if prefix else key)
    return found


def test_a_firing_changes_only_what_it_says(desk: RetrainingDesk) -> None:
    loaded = require_usable(desk.request())
    run = run_of_firing(loaded, name="weekly-1", root="/data/1", model="/data/m", data="/data/d")
    before, after = flat(loaded.document), flat(run.document)
    changed = {key: after[key] for key in after if before.get(key) != after[key]}
    assert changed == dict(zip(CHANGED, ("weekly-1", "/data/1", "/data/m", "/data/d"), strict=True))


def test_a_tiny_model_is_a_first_parent_and_a_folder_the_next_one(desk: RetrainingDesk) -> None:
    document = desk.document(model={"source": "tiny", "tiny": {"warmup_accuracy": 0.0}})
    loaded = require_usable(desk.request(config=document))
    first = run_of_firing(loaded, name="a", root="/data/a", model="tiny", data="/data/d")
    assert first.spec.model.tiny is not None
    second = run_of_firing(loaded, name="b", root="/data/b", model="/data/export", data="/data/d")
    assert second.spec.model.tiny is None


def test_the_place_of_the_run_file_does_not_change_what_is_asked(desk: RetrainingDesk) -> None:
    request = desk.request()
    moved = request.model_copy(update={"config_path": "elsewhere.toml"})
    assert request_sha256(request) == request_sha256(moved)
    other = request.model_copy(update={"tolerance": 0.5})
    assert request_sha256(request) != request_sha256(other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": ()}, "no pattern of new data is given"),
        ({"data": ("new/*.jsonl",)}, 'data = "new/*.jsonl": must be an absolute path or a URL'),
        ({"metric": "rollout/reward"}, "no figure that a promotion can be decided by"),
        ({"tolerance": math.inf}, "tolerance"),
        ({"max_unscored_fraction": -0.1}, "must be a share from 0 to 1"),
        ({"config": {}}, "the workflow input has no 'config'"),
        ({"config_sha256": "0" * 64}, "config_sha256 is 000"),
    ],
)
def test_a_request_without_a_basis_is_refused(
    desk: RetrainingDesk, fields: dict[str, Any], message: str
) -> None:
    request = desk.request().model_copy(update=fields)
    with pytest.raises(ConfigurationError) as refused:
        require_usable(request)
    assert message in refused.value.message


def test_generated_prompts_are_no_new_data(desk: RetrainingDesk) -> None:
    document = desk.document()
    document["data"] = {"tasks": [{"task": "reverse_word", "train_count": 8, "eval_count": 8}]}
    with pytest.raises(ConfigurationError, match=r"data\.tasks: a firing trains on the files"):
        require_usable(desk.request(config=document))


def test_fields_of_a_later_version_are_ignored(desk: RetrainingDesk) -> None:
    given = {**desk.request().model_dump(mode="json"), "from_the_future": 1}
    assert RetrainingRequest.model_validate_json(json.dumps(given)) == desk.request()
