"""A run without engines and trainer: its files are made by the writers of the real one."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from activities.rollout.collection_file import write_collection
from activities.rollout.source import PromptSource
from activities.storage import layout
from activities.storage.commit import commit_checkpoint, newest_checkpoint, read_cursor
from activities.storage.lease import Owner, claim_epoch
from activities.storage.store import Store
from models.checkpoint import CheckpointFile, PolicyClock
from models.ids import FenceToken, RunRef
from models.prompt import DataState, PreparedPrompt, PromptDraw, PromptMetadata
from models.rollout import CollectionCounts, CollectionManifest, DroppedGroup, RolloutCollection
from models.sample import FinishReason, Sample, SampleGroup, TokenSpan

TIED = "zero_std_0.0"


class SyntheticRun:
    """``batch`` groups an update, one optimizer step each; the caller decides what happens when."""

    def __init__(self, root: str, *, num_prompts: int = 40, batch: int = 4) -> None:
        self.store = Store(root)
        self.ref = RunRef(run_id="train/made", root=self.store.root, spec_sha256="0" * 64)
        self.prompts = [_prompt(row) for row in range(num_prompts)]
        self.batch = batch
        self.epoch = 0
        self.trained = -1
        """The last update in the trainer."""
        self.trained_sha256 = ""
        self._saves = 0
        self.source = self.source_at(DataState())
        self.store.write_json(
            layout.WORKFLOW_JSON, {"run_id": self.ref.run_id, "status": "training"}
        )
        self.store.write_json(layout.RESOLVED_CONFIG, document_of(self.store.root, batch))
        self.claim()

    def claim(self) -> None:
        """Take a new epoch, as every rebuild does."""
        owner = Owner(run_id=self.ref.run_id, namespace="default", cluster_id="one")
        self.epoch = claim_epoch(self.store, owner)

    def source_at(self, state: DataState) -> PromptSource:
        """The source of a producer that starts at ``state``."""
        return PromptSource(
            self.prompts,
            seed=1,
            shuffle=True,
            samples_per_prompt=2,
            train_sha256="a" * 64,
            state=state,
        )

    def collect(self, update: int, dropped: int = 0) -> CollectionManifest:
        """Commit a collection; the first ``dropped`` draws of it tie."""
        self.source.forget(self.trained)
        self.source.give_back_from(update)
        draws = self.source.draw(self.batch + dropped)
        tied = [DroppedGroup(draw=draw, reason=TIED) for draw in draws[:dropped]]
        return self.commit(update, draws[dropped:], tied)

    def commit(
        self,
        update: int,
        kept: Sequence[PromptDraw],
        dropped: Sequence[DroppedGroup] = (),
        *,
        acknowledged: Iterable[int] | None = None,
    ) -> CollectionManifest:
        """Write a collection of ``kept``, in that order.

        ``acknowledged`` are the groups that leave the ledger with it, by default those that it
        keeps or drops; anything else is a fault.
        """
        if acknowledged is None:
            acknowledged = [draw.group_index for draw in (*kept, *(each.draw for each in dropped))]
        self.source.assign(update, acknowledged)
        after = self.source.snapshot(update)
        uri = layout.collection_parquet(update, self.epoch)
        sha256 = write_collection(self.store, uri, [group_of(draw, update) for draw in kept])
        manifest = CollectionManifest(
            collection=RolloutCollection(
                update=update,
                epoch=self.epoch,
                uri=uri,
                sha256=sha256,
                counts=CollectionCounts(
                    groups=len(kept),
                    samples=2 * len(kept),
                    prompt_tokens=2 * len(kept),
                    response_tokens=2 * len(kept),
                    filtered_groups=dict(Counter(each.reason for each in dropped)),
                ),
                reward_mean=0.5,
                min_version=update,
                max_version=update,
                seconds=1.0,
            ),
            data_after=after,
            dropped=tuple(dropped),
        )
        self.write_manifest(manifest)
        return manifest

    def write_manifest(self, manifest: CollectionManifest) -> None:
        """Write or replace a manifest."""
        place = manifest.collection.update, manifest.collection.epoch
        self.store.write_json(layout.collection_manifest(*place), manifest.model_dump(mode="json"))

    def train(self, manifest: CollectionManifest, *, recorded: bool = True) -> None:
        """Apply the next update; without ``recorded`` its report is lost."""
        update = manifest.collection.update
        assert update == self.trained + 1
        self.trained, self.trained_sha256 = update, manifest.collection.sha256
        if recorded:
            self.row(update, self.epoch, manifest.collection.sha256, update + 1)

    def row(self, update: int, epoch: int, sha256: str, version: int) -> None:
        """Append a row of a finished update."""
        row = {"update": update, "epoch": epoch, "batch_sha256": sha256, "policy_version": version}
        self.store.append_jsonl(layout.UPDATES, row)

    def updates(self, first: int, last: int, dropped: int = 0) -> None:
        """Collect and train one after another, ``last`` included."""
        for update in range(first, last + 1):
            self.train(self.collect(update, dropped))

    def checkpoint(self) -> None:
        """Commit what is trained."""
        self._saves += 1
        token = FenceToken(epoch=self.epoch, update=self.trained + 1, attempt=self._saves)
        folder = layout.checkpoint_folder(self.trained, token)
        data = f"state {self.trained} {self.epoch}".encode()
        self.store.write_bytes(f"{folder}/state.json", data)
        file = CheckpointFile(
            path="state.json", sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data)
        )
        clock = PolicyClock(
            completed_steps=self.trained + 1,
            published_step=self.trained + 1,
            next_rollout_id=self.trained + 1,
        )
        cursor = self.source.snapshot(self.trained)
        commit_checkpoint(self.store, self.ref, token, clock, cursor, (file,), folder)

    def lose_trainer(self) -> None:
        """Rebuild trainer and producer from the newest checkpoint, or the start, in a new epoch."""
        self.restore_trainer()
        self.claim()

    def restore_trainer(self) -> None:
        """Trainer and producer as the newest checkpoint, or the start, has them."""
        newest = newest_checkpoint(self.store)
        self.trained, self.trained_sha256 = -1 if newest is None else newest.update, ""
        self.source = self.source_at(
            DataState() if newest is None else read_cursor(self.store, newest)
        )

    def lose_producer(self) -> None:
        """Rebuild the producer after what the trainer trained last, in a new epoch."""
        self.source = self.source_at(self.position())
        self.claim()

    def position(self) -> DataState:
        """After the collection that was trained last: its manifest's, else the checkpoint's."""
        if self.trained < 0:
            return DataState()
        for epoch in range(self.epoch, 0, -1):
            path = layout.collection_manifest(self.trained, epoch)
            if self.store.exists(path):
                manifest = CollectionManifest.model_validate(self.store.read_json(path))
                if manifest.collection.sha256 == self.trained_sha256:
                    return manifest.data_after
        newest = newest_checkpoint(self.store)
        assert newest is not None
        assert newest.update == self.trained
        return read_cursor(self.store, newest)


def document_of(root: str, batch: int) -> dict[str, object]:
    """A run file whose updates take one optimizer step."""
    return {
        "schema_version": 1,
        "name": "made",
        "model": {"source": "/models/small"},
        "data": {"prompt_data": "/data/train.jsonl"},
        "output": {"root": root},
        "training": {"rollout_batch_size": batch, "samples_per_prompt": 2, "num_rollouts": 8},
    }


def group_of(draw: PromptDraw, version: int, rewards: Sequence[float] = (0.0, 1.0)) -> SampleGroup:
    """Two samples of one token each."""
    samples = [
        Sample(
            sample_index=draw.first_sample_index + each,
            group_index=draw.group_index,
            prompt_token_ids=[1],
            response_token_ids=[2],
            logprobs=[-1.0],
            spans=[TokenSpan(version, 0, 1)],
            finish_reason=FinishReason.STOP,
            reward=reward,
        )
        for each, reward in enumerate(rewards)
    ]
    return SampleGroup(draw.group_index, draw.prepared_sample_id, draw.epoch_id, samples)


def _prompt(row: int) -> PreparedPrompt:
    return PreparedPrompt(
        input=str(row),
        label="",
        prompt_token_ids=(1,),
        metadata=PromptMetadata(
            prepared_sample_id=f"task:train:{row}",
            source_dataset="task",
            source_row=row,
            query=str(row),
            verifiers=(),
            run_prompt_tokens=1,
            run_prompt_token_ids_sha256="",
        ),
    )
