"""Artifact names, as the operations guide and its readers know them."""

import re

from activities.storage import layout
from models.ids import FenceToken


def test_names_of_the_operations_guide() -> None:
    assert layout.WORKFLOW_JSON == "workflow.json"
    assert layout.PLAN_JSON == "plan.json"
    assert layout.RESOLVED_CONFIG == "run-spec.json"
    assert layout.ATTEMPTS_JSON == "attempts.json"
    assert layout.PREPARED_MODEL == "prepared/hf"
    assert layout.TRAIN_JSONL == "prepared/data/train.jsonl"
    assert layout.EVAL_JSONL == "prepared/data/eval.jsonl"
    assert layout.MANIFEST_JSON == "prepared/data/manifest.json"
    assert layout.LATEST == "checkpoints/core-latest.json"
    assert layout.DRIVER_TIMING == "checkpoints/driver_timing.jsonl"
    assert layout.ROLLOUT_ERRORS == "checkpoints/rollout_errors.jsonl"


def test_numbered_names() -> None:
    token = FenceToken(epoch=1, update=4, attempt=2)
    assert layout.checkpoint_folder(4, token) == "checkpoints/core/rollout_0000004.e1u4a2"
    assert layout.collection_parquet(12, 3) == "rollouts/0000012.e3.parquet"
    assert layout.collection_manifest(12, 3) == "rollouts/0000012.e3.json"
    assert layout.eval_parquet(0, 1) == "rollouts/eval_0000000.e1.parquet"
    assert layout.epoch_file(7) == "lease/epoch-00000007.json"


def test_no_two_tokens_share_a_folder() -> None:
    tokens = [
        FenceToken(epoch=epoch, update=update, attempt=attempt)
        for epoch in (1, 11)
        for update in (1, 11)
        for attempt in (1, 11)
    ]
    folders = {layout.checkpoint_folder(u, token) for u in (1, 11) for token in tokens}
    assert len(folders) == 2 * len(tokens)


def test_all_paths_are_relative() -> None:
    constants = [value for name, value in vars(layout).items() if name.isupper()]
    assert constants
    for path in constants:
        assert re.fullmatch(r"[a-z.][a-z0-9._/-]*", path), path
