"""The rig of the rollout tests."""

from pathlib import Path

import pytest

from tests.support.rollout_rig import RolloutRig


@pytest.fixture
async def rig(tmp_path: Path):
    made = RolloutRig(tmp_path)
    yield made
    for producer in made.producers:
        await producer.close()
