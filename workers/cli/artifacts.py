"""What a run left under its output root, as far as people want to see it at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from activities.analysis.costs import UpdateCosts, update_costs
from activities.storage import layout
from activities.storage.store import Store
from models.errors import PerdureError
from models.metrics import is_mean_reward

FLEET_JSON = "fleet.json"


@dataclass(frozen=True, slots=True)
class History:
    """Curves of a run, read from ``metrics.jsonl``."""

    rewards: tuple[float, ...] = ()
    """Mean reward of each update, by update index; redone updates count once, the last try."""
    evaluations: tuple[tuple[int, float], ...] = ()
    """(completed updates, mean held-out reward), ascending."""

    @property
    def reward_first(self) -> float | None:
        """Mean over the first tenth of the updates, at least one."""
        return _mean(self.rewards[: _tenth(len(self.rewards))])

    @property
    def reward_last(self) -> float | None:
        """Mean over the last tenth of the updates, at least one."""
        return _mean(self.rewards[-_tenth(len(self.rewards)) :])


def read_history(root: str) -> History:
    """Read the curves; empty when the root cannot be read or holds none."""
    rewards: dict[int, float] = {}
    evaluations: dict[int, float] = {}
    for row in rows_of(root, layout.METRICS):
        step, reward = row.get("rollout/step"), row.get("rollout/reward")
        if step is not None and reward is not None:
            rewards[int(step)] = float(reward)
        done = row.get("eval/step")
        means = [row[key] for key in sorted(row) if is_mean_reward(key) and row[key] is not None]
        if done is not None and means:
            evaluations[int(done)] = float(means[0])
    return History(
        tuple(value for _, value in sorted(rewards.items())), tuple(sorted(evaluations.items()))
    )


def read_costs(root: str) -> UpdateCosts | None:
    """What an update cost; none when the root cannot tell."""
    try:
        return update_costs(Store(root))
    except (PerdureError, OSError, KeyError):
        return None


def read_submissions(root: str) -> Sequence[dict[str, Any]]:
    """Summaries of the receipts of background evaluations; none when the root cannot tell."""
    # Receipts bring the samplers along, which is more than most verbs need.
    from workers.cli.receipts import summaries

    try:
        return summaries(root)
    except (PerdureError, OSError):
        return ()


def read_json(root: str, name: str) -> Any:
    """A JSON file of the root; none when there is none."""
    try:
        return Store(root).read_json(name)
    except (PerdureError, OSError, ValueError):
        return None


def last_row(root: str, name: str) -> dict[str, Any]:
    """The newest row of a JSONL file of the root; empty when there is none."""
    try:
        return Store(root).last_jsonl(name) or {}
    except (PerdureError, OSError):
        return {}


def exists(root: str, name: str) -> bool:
    """Whether the root holds ``name``; also true when nobody can tell."""
    try:
        return Store(root).exists(name)
    except (PerdureError, OSError, ValueError):
        return True


def rows_of(root: str, name: str) -> list[dict[str, Any]]:
    """Whole rows of a JSONL file of the root; none when there is none."""
    try:
        return Store(root).read_jsonl(name).rows
    except (PerdureError, OSError):
        return []


def _tenth(count: int) -> int:
    return max(1, round(count / 10))


def _mean(values: tuple[float, ...]) -> float | None:
    return sum(values) / len(values) if values else None
