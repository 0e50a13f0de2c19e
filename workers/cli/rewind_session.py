"""One ``rewind``: look whether it is possible, end the run, start it again with the rewind.

The files are changed by the claim of the new start alone, under its epoch; this only looks at them.
"""

import asyncio
import shlex
from collections.abc import Sequence

from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from activities.background.receipts import receipts
from activities.lifecycle import require_another_start
from activities.rewinding import plan_rewind
from activities.storage import layout
from activities.storage.commit import intact_checkpoints, verify_checkpoint
from activities.storage.lease import current_epoch
from activities.storage.store import Store
from configs.compare import differences, recorded_identity
from configs.load import Loaded, load_run
from models.checkpoint import RewindRequest
from models.errors import ConfigurationError, RequestRefused, ServiceUnreachable
from models.run import StopRequest
from workers.cli.control import update_line
from workers.cli.launching import launch
from workers.cli.names import as_options
from workers.cli.output import equivalent, notice
from workers.cli.place import Place
from workers.cli.run import start_line
from workers.cli.server import RunView, connect_to, look, progress_of, request_update


class RewindSession:
    """A rewind on its way. ``named``: how the user named the run; ``loaded`` when by its file."""

    def __init__(
        self,
        place: Place,
        run_id: str,
        request: RewindRequest,
        loaded: Loaded | None,
        named: str,
        overrides: Sequence[str],
    ) -> None:
        self._place = place
        self._run_id = run_id
        self._request = request
        self._loaded = loaded
        self._file = named
        self._overrides = overrides

    async def run(self, stop: StopRequest, wait_s: float) -> None:
        """Stop the run where it is going on, and start it again at the checkpoint.

        Raises:
            ConfigurationError: the rewind is impossible; nothing was changed.
            RequestRefused: the run would not stop, did not in time, or was started meanwhile.
            ServiceUnreachable: the server did not answer.
        """
        client = await connect_to(self._place)
        view = await look(client, self._run_id)
        loaded = await asyncio.to_thread(self._possible, view)
        store = Store(loaded.spec.output.root)
        await self._refuse_open_evaluations(client, store)
        is_open = view is not None and view.is_open
        stops = is_open and await self._goes_on(client)
        stop = stop.model_copy(update={"restarts": True})
        if stops and stop.checkpoint:
            await asyncio.to_thread(self._require_kept, store, loaded)
        self._say_how(loaded, stop if stops else None)
        if stops:
            await request_update(client, self._run_id, "stop", stop)
            notice(f"{self._run_id} stops after the running update")
        if is_open:
            await self._closed(client, wait_s)
        try:
            receipt = await launch(client, self._place, loaded, rewind=self._request)
        except WorkflowAlreadyStartedError:
            raise RequestRefused(
                f"{self._run_id} was started by somebody else just now; nothing was rewound"
            ) from None
        notice(f"{self._run_id} goes back to {self._request.updates} updates; receipt: {receipt}")

    def _possible(self, view: RunView | None) -> Loaded:
        """The run file to go on with. Reads the whole checkpoint, as long as that takes."""
        root = str(view.memo.get("root") or "") if view else ""
        if self._loaded is not None:
            root = self._loaded.spec.output.root
        if not root:
            raise ConfigurationError(
                f"{self._run_id}: its output root is unknown here; name the run by its run file"
            )
        store = Store(root)
        if self._loaded is None:
            self._file = f"{store.root}/{layout.RESOLVED_CONFIG}"
            self._loaded = load_run(self._file)
        rewind = plan_rewind(store, self._request, current_epoch(store) + 1, "")
        recorded = store.read_json(layout.RESOLVED_CONFIG)
        if recorded_identity(recorded) != self._loaded.identity:
            raise ConfigurationError(
                f"{self._loaded.path} means another run than {root} holds (different: "
                f"{differences(recorded, self._loaded)}); a run goes back under its own run file, "
                "another one starts with: perdure fork"
            )
        require_another_start(store, self._loaded)
        verify_checkpoint(store, rewind.checkpoint)
        return self._loaded

    def _require_kept(self, store: Store, loaded: Loaded) -> None:
        """The checkpoint that the stop commits must not push the one to go back to out."""
        wanted, core = self._request.updates, loaded.spec.core
        every, last = core.checkpoint_keep_every, core.checkpoint_keep_last
        newer = sum(updates > wanted for updates in intact_checkpoints(store))
        if last is None or newer + 1 < last or (every is not None and wanted % every == 0):
            return
        raise RequestRefused(
            f"{self._run_id} keeps {last} checkpoints (core.checkpoint_keep_last), and one more "
            f"when it stops would remove that after {wanted} updates; give --no-checkpoint"
        )

    async def _refuse_open_evaluations(self, client: Client, store: Store) -> None:
        """Background evaluations of undone updates write under the root as long as they run."""
        found = await asyncio.to_thread(lambda: list(receipts(store)))
        for rel, receipt in found:
            if receipt.update <= self._request.updates or receipt.result is not None:
                continue
            view = await look(client, receipt.experiment_id) if receipt.experiment_id else None
            if view is not None and view.is_open:
                raise RequestRefused(
                    f"the background evaluation after {receipt.update} updates still runs "
                    f"({store.root}/{rel}); wait for it, or: "
                    f"{self._place.stock('workflow', 'cancel', '-w', receipt.experiment_id)}"
                )

    async def _goes_on(self, client: Client) -> bool:
        """Whether nobody has stopped the open run yet, and it is not ending by itself."""
        progress = await progress_of(client, self._run_id)
        return progress is None or (progress.stop is None and not progress.state.is_terminal)

    async def _closed(self, client: Client, wait_s: float) -> None:
        handle = client.get_workflow_handle(self._run_id)
        try:
            async with asyncio.timeout(wait_s):
                await handle.result()
        except WorkflowFailureError:
            return  # it has ended, which is all that counts here
        except TimeoutError:
            raise RequestRefused(
                f"{self._run_id} did not stop within {wait_s:g} s; nothing was rewound. It stops "
                "after the running update: then give the same command again"
            ) from None
        except RPCError as error:
            raise ServiceUnreachable(f"Temporal does not answer: {error.message}") from error

    def _say_how(self, loaded: Loaded, stop: StopRequest | None) -> None:
        if stop is not None:
            equivalent(update_line(self._place, self._run_id, "stop", stop))
        words = [*as_options(self._overrides), "--rewind-to", str(self._request.updates)]
        if self._request.reason:
            words += ["--reason", self._request.reason]
        file = shlex.join([self._file, *words])
        equivalent(start_line(self._place, loaded.spec, file))
