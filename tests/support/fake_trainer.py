"""A trainer in memory: fenced like the real one, scriptable, counts instead of learning."""

import hashlib

from activities.fencing import FenceGuard
from activities.storage.store import Store
from activities.wire.digest import weights_digest
from models.checkpoint import CheckpointFile
from models.errors import TrainerLost
from models.evaluation import ExportReport
from models.ids import FenceToken
from models.ports import StageProgress
from models.publication import WeightsRef
from models.rollout import RolloutCollection
from models.update import UpdateReport
from tests.support.fake_engines import Script, checksums_of


class FakeTrainer:
    """Counts instead of learning; one optimizer step an update."""

    def __init__(self, script: Script, store: Store) -> None:
        self.script, self.store = script, store
        self.guard = FenceGuard("trainer")
        self.alive = True
        self.next_update = 0
        self.policy_version = 0
        self.no_signal: set[int] = set()
        self.reports: dict[tuple[int, str], UpdateReport] = {}
        self.export_ref: WeightsRef | None = None
        self.applied: list[int] = []

    def _check(self, token: FenceToken | None = None) -> None:
        if not self.alive:
            raise TrainerLost("the trainer is gone")
        if token is not None:
            self.guard.admit(token)

    async def optimize(
        self, token: FenceToken, update: int, collection: RolloutCollection
    ) -> UpdateReport:
        self._check(token)
        await self._play(f"optimize {update}")
        key = (update, collection.sha256)
        if key not in self.reports:
            self._check(token)
            steps = 0 if update in self.no_signal else 1
            self.policy_version += steps
            self.next_update = update + 1
            self.applied.append(update)
            self.reports[key] = UpdateReport(
                update=update,
                batch_sha256=collection.sha256,
                policy_version=self.policy_version,
                optimizer_steps=steps,
                no_signal=steps == 0,
                metrics={"train/loss": 0.5},
                seconds=0.01,
            )
        return self.reports[key]

    async def export_weights(self, token: FenceToken, version: int) -> WeightsRef:
        self._check(token)
        await self._play(f"export_weights {version}")
        assert version == self.policy_version
        folder = f"exports-of-the-fake-trainer/{version}"
        self.store.write_bytes(f"{folder}/model.safetensors", f"{version}".encode())
        self.export_ref = WeightsRef(
            version=version,
            path=str(self.store.local_path(folder)),
            digest=weights_digest(checksums_of(version)),
            num_tensors=1,
            num_bytes=8,
            dtype="float32",
        )
        return self.export_ref

    async def keep_offered(self, token: FenceToken, version: int) -> None:
        self._check(token)
        await self._play(f"keep_offered {version}")

    async def kept(self, version: int) -> WeightsRef | None:
        self._check()
        return None

    async def exported(self) -> WeightsRef | None:
        self._check()
        return self.export_ref

    async def save(self, token: FenceToken, folder: str) -> tuple[CheckpointFile, ...]:
        self._check(token)
        await self._play(f"save {self.next_update - 1}")
        data = f"{self.policy_version}".encode()
        self.store.write_bytes(f"{folder}/model/state.bin", data)
        digest = hashlib.sha256(data).hexdigest()
        return (CheckpointFile(path="model/state.bin", sha256=digest, num_bytes=len(data)),)

    async def export(self, token: FenceToken, uri: str) -> ExportReport:
        self._check(token)
        await self._play("export")
        self.store.write_bytes(f"{uri}/config.json", b"{}")
        self.store.write_bytes(f"{uri}/model.safetensors", f"{self.policy_version}".encode())
        return ExportReport(
            uri=uri,
            policy_version=self.policy_version,
            num_bytes=8,
            num_parameters=2,
            max_abs_logit_difference=0.0,
            seconds=0.01,
        )

    async def progress(self) -> StageProgress:
        self._check()
        return StageProgress(stage="optimize", done=1, total=2)

    async def _play(self, call: str) -> None:
        try:
            await self.script.play(call)
        except TrainerLost:
            self.alive = False
            raise
