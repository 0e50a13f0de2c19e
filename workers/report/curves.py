"""The curves of a run, from ``metrics.jsonl``: one point an update, the last try of each."""

from collections.abc import Iterable
from typing import NamedTuple

from models.metrics import is_mean_reward
from workers.report.charts import Chart, Series, draw
from workers.report.files import Row, index, number

Curve = list[tuple[float, float]]


class _Plan(NamedTuple):
    title: str
    unit: str
    meaning: str
    curves: tuple[tuple[str, str], ...]
    """(name, metric)."""


_PLANS = (
    _Plan(
        "Policy lag",
        "optimizer steps",
        "how old samples were when they trained",
        (
            ("oldest token", "train/lag"),
            ("mean of groups", "rollout/fully_async/avg_staleness"),
        ),
    ),
    _Plan(
        "Response length",
        "tokens",
        "of sampled responses",
        (
            ("mean", "rollout/response_len/mean"),
            ("longest", "rollout/response_len/max"),
            ("shortest", "rollout/response_len/min"),
        ),
    ),
    _Plan("Entropy", "nats", "mean over trained tokens", (("entropy", "train/entropy_loss"),)),
    _Plan(
        "Cut and mixed responses",
        "fraction",
        "at the token limit; of more than one policy version",
        (
            ("cut", "rollout/truncated_ratio"),
            ("mixed versions", "rollout/weight_version/mixed_version_ratio"),
        ),
    ),
    _Plan(
        "Groups with a signal",
        "groups",
        "groups of a collection whose rewards differ",
        (("mixed rewards", "rollout/mixed_reward_groups"),),
    ),
    _Plan(
        "Trainer and engine log-probs",
        "nats",
        "mean absolute difference; no smaller than rounding and age allow",
        (("difference", "train/train_rollout_logprob_abs_diff"),),
    ),
    _Plan(
        "Clipping",
        "fraction",
        "tokens on the clipped branch; importance weights cut",
        (("clipped", "train/pg_clipfrac"), ("truncated weights", "train/tis_clipfrac")),
    ),
    _Plan("Gradient norm", "1", "before clipping, last step", (("norm", "train/grad_norm"),)),
    _Plan(
        "Seconds",
        "s",
        "of the update in the trainer, and of the collection",
        (("training", "train/step_seconds"), ("collection", "rollout/seconds")),
    ),
    _Plan(
        "Throughput",
        "tokens/s",
        "response tokens delivered; model tokens trained",
        (
            ("delivered", "rollout/response_tokens_per_second"),
            ("trained", "train/model_tokens_per_second"),
        ),
    ),
    _Plan(
        "Router load",
        "1",
        "busiest over mean expert, worst layer",
        (("max / mean", "train/moe/max_mean_load_ratio"),),
    ),
)


class Curves:
    """Every metric by update; of updates that were done again the last try."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._updates: dict[int, Row] = {}
        self._evaluations: dict[int, Row] = {}
        for row in rows:
            if (done := index(row, "eval/step")) is not None:
                self._evaluations.setdefault(done, {}).update(row)
                continue
            update = index(row, "rollout/step")
            update = index(row, "train/rollout_id") if update is None else update
            if update is not None:
                self._updates.setdefault(update, {}).update(row)

    def of(self, metric: str) -> Curve:
        """(update, value), where there is one."""
        return [
            (float(update), value)
            for update, row in sorted(self._updates.items())
            if (value := number(row, metric)) is not None
        ]

    def total(self, metric: str) -> float:
        """Sum over the updates."""
        return sum(value for _, value in self.of(metric))

    def with_prefix(self, prefix: str) -> dict[str, float]:
        """Sums over the updates of every metric under ``prefix``, by the rest of the name."""
        sums: dict[str, float] = {}
        for row in self._updates.values():
            for key in row:
                if key.startswith(prefix) and (value := number(row, key)):
                    sums[key.removeprefix(prefix)] = sums.get(key.removeprefix(prefix), 0) + value
        return dict(sorted(sums.items()))

    @property
    def evaluations(self) -> list[Row]:
        """Rows of evaluations, by completed updates."""
        return [row for _, row in sorted(self._evaluations.items())]

    def held_out(self) -> dict[str, Curve]:
        """Mean held-out reward by completed updates, for each held-out set."""
        curves: dict[str, Curve] = {}
        for done, row in sorted(self._evaluations.items()):
            for key in sorted(filter(is_mean_reward, row)):
                if (value := number(row, key)) is not None:
                    curves.setdefault(key, []).append((float(done), value))
        return curves

    def charts(self) -> list[Chart]:
        """What can be drawn, reward first."""
        reward = [Series("training", self.of("rollout/reward"))]
        reward += [Series(name, points, dots=True) for name, points in self.held_out().items()]
        drawn = [draw("Reward", "1", "mean of the samples with a score; held-out sets", reward)]
        for plan in _PLANS:
            series = [Series(name, self.of(metric)) for name, metric in plan.curves]
            drawn.append(draw(plan.title, plan.unit, plan.meaning, series))
        return [chart for chart in drawn if chart is not None]
