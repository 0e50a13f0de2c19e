"""``launch.timeout_s``: Temporal ends a run that takes longer, and the command line says why."""

import asyncio
import uuid
from pathlib import Path

import pytest
from temporalio.client import Client

from configs.load import Loaded, load_run
from models.errors import ConfigurationError
from workers.cli.server import Failure, outcome_of, start_run

pytestmark = pytest.mark.workflow

DOCUMENT = """
schema_version = 1
name = "{name}"
[model]
source = "tiny"
[model.tiny]
[[data.tasks]]
task = "reverse_word"
train_count = 64
[output]
root = "{root}"
[training]
num_rollouts = 2
rollout_batch_size = 2
samples_per_prompt = 2
"""


def loaded(folder: Path, *overrides: str) -> Loaded:
    path = folder / "run.toml"
    path.write_text(DOCUMENT.format(name=f"limit-{uuid.uuid4().hex[:8]}", root=folder / "root"))
    return load_run(path, overrides)


async def test_a_run_that_takes_longer_is_ended(temporal_client: Client, tmp_path: Path) -> None:
    asked = loaded(tmp_path, "launch.timeout_s=1.5")
    # No worker of the session takes it within that time: its queue's worker may not even be there.
    await start_run(temporal_client, asked, take_over=False)
    handle = temporal_client.get_workflow_handle(asked.spec.run_id)
    limit = (await handle.describe()).raw_description.execution_config.workflow_execution_timeout
    assert limit.ToTimedelta().total_seconds() == pytest.approx(1.5)

    outcome = await asyncio.wait_for(outcome_of(temporal_client, asked.spec.run_id), 20)

    assert isinstance(outcome, Failure)
    assert outcome.kind == "RunTimeout"
    assert "launch.timeout_s" in outcome.message


def test_the_limit_is_no_part_of_what_a_run_means(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(DOCUMENT.format(name="x", root=tmp_path / "root"))
    assert load_run(path).identity == load_run(path, ["launch.timeout_s=60.0"]).identity


def test_a_limit_below_the_soft_deadline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"launch\.timeout_s = 60\.0: would end the run"):
        loaded(tmp_path, "launch.timeout_s=60.0", "core.max_run_seconds=60.0")
