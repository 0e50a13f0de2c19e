"""A fully async run without engines and trainer: groups finish in any order, far ahead of use."""

from synthetic_run import SyntheticRun

from models.prompt import PromptDraw
from models.rollout import CollectionManifest, DroppedGroup


class SyntheticAsyncRun(SyntheticRun):
    """The producer's hands are lists that the caller moves groups between."""

    def __init__(self, root: str, *, num_prompts: int = 40, batch: int = 4) -> None:
        self.making: list[PromptDraw] = []
        """Handed out and unfinished."""
        self.finished: list[PromptDraw] = []
        """Waiting for the trainer, in the order in which they finished."""
        self.unlisted: list[DroppedGroup] = []
        """Dropped since the last collection."""
        super().__init__(root, num_prompts=num_prompts, batch=batch)

    def submit(self, count: int = 1) -> None:
        """Hand out prompts, those that wait again before new ones."""
        self.making += self.source.draw(count)

    def finish(self, draw: PromptDraw) -> None:
        """Its group is scored and may train."""
        self.making.remove(draw)
        self.finished.append(draw)

    def fail(self, draw: PromptDraw) -> None:
        """Its attempt met a serving fault: the prompt waits again."""
        self.making.remove(draw)
        self.source.requeue([draw.group_index])

    def go_stale(self, draw: PromptDraw) -> None:
        """Its finished group is too old: the prompt waits again."""
        self.finished.remove(draw)
        self.source.requeue([draw.group_index], failed=False, stale=True)

    def drop(self, draw: PromptDraw, reason: str) -> None:
        """It is finished for good without training; the next collection says so."""
        (self.making if draw in self.making else self.finished).remove(draw)
        self.unlisted.append(DroppedGroup(draw=draw, reason=reason))

    def collect(self, update: int, dropped: int = 0) -> CollectionManifest:
        """Commit the first finished groups; the first ``dropped`` finished ones tie."""
        self.source.forget(self.trained)
        self.source.give_back_from(update)
        for draw in self.finished[:dropped]:
            self.drop(draw, "zero_std_1.0")
        kept, self.finished = self.finished[: self.batch], self.finished[self.batch :]
        assert len(kept) == self.batch
        listed, self.unlisted = self.unlisted, []
        return self.commit(update, kept, listed)

    def claim(self) -> None:
        """Take a new epoch: finished groups stay, unfinished ones are given back."""
        making, self.making = self.making, []
        self.source.requeue(sorted(draw.group_index for draw in making), failed=False)
        super().claim()

    def lose_trainer(self) -> None:
        """Also ends the producer."""
        self.forget_groups()
        super().lose_trainer()

    def lose_producer(self) -> None:
        """What it held is gone; what it had drawn is drawn again."""
        self.forget_groups()
        super().lose_producer()

    def forget_groups(self) -> None:
        """The process that held them is gone."""
        self.making, self.finished, self.unlisted = [], [], []
