"""One ``run``: find the workflow of the run's name, start it unless it is there, follow it."""

import asyncio
import shlex
from collections.abc import Sequence

from temporalio.client import Client
from temporalio.exceptions import WorkflowAlreadyStartedError

from activities.storage import layout
from configs.compare import differences, recorded_identity
from configs.load import Loaded, comparable_sha256
from models.errors import ConfigurationError
from models.run import RunOutcome, RunProgress, RunState
from workers.cli import artifacts, errors
from workers.cli.display import LiveReporter, PlainReporter, Reporter
from workers.cli.ending import Ending, read_ending, show_ending
from workers.cli.export_report import export_report_of
from workers.cli.follow import follow
from workers.cli.launching import launch
from workers.cli.output import err, notice, out, print_json
from workers.cli.place import Place
from workers.cli.server import (
    RunView,
    connect_to,
    look,
    outcome_of,
    progress_of,
)


class Session:
    """A run file on its way through a server. ``again``: what came after ``perdure run``."""

    def __init__(
        self, loaded: Loaded, place: Place, *, again: Sequence[str], as_json: bool, take_over: bool
    ) -> None:
        self._loaded = loaded
        self._place = place
        self._again = again
        self._as_json = as_json
        self._take_over = take_over

    async def run(self, *, follow: bool) -> int:
        """Start or join; follow to the end when asked. Returns the exit code."""
        client = await connect_to(self._place)
        run_id = self._loaded.spec.run_id
        view = await look(client, run_id)
        if view is not None and not view.is_open:
            ending = await self._finished(client, view)
            if ending is not None:
                self._say(f"{run_id} is complete already; nothing is started")
                return self._end(ending)
        if view is not None and view.is_open:
            await self._refuse_another(client, view)
            self._say(f"{run_id} runs already; joining it")
        else:
            await self._start(client, again=view is not None)
        if not follow:
            self._leave()
            return errors.DONE
        return self._end(await self._follow(client))

    async def _start(self, client: Client, *, again: bool) -> None:
        run_id = self._loaded.spec.run_id
        try:
            receipt = await launch(client, self._place, self._loaded, take_over=self._take_over)
        except WorkflowAlreadyStartedError:
            view = await look(client, run_id)
            if view is not None:
                await self._refuse_another(client, view)
            self._say(f"{run_id} was started by somebody else just now; joining it")
            return
        self._say(f"{run_id} {'starts again and resumes' if again else 'started'}")
        self._say(f"receipt: {receipt}")

    async def _refuse_another(self, client: Client, view: RunView) -> None:
        """Join only a run that means the same: equal identities, whatever the retry limits."""
        running = view.memo.get("identity_sha256")
        if running is None:
            progress = await progress_of(client, view.run_id)
            running = progress.run.spec_sha256 if progress and progress.run else None
        if running is None or running == self._loaded.sha256:
            return
        changed = self._changed(running, self._root_of(view))
        if changed is not None:
            raise ConfigurationError(
                f"{self._loaded.path}: {view.run_id} is running with another configuration: "
                f"{running} there, {self._loaded.identity} here{changed}; give this one another "
                f"name, or stop that one first: perdure stop {self._loaded.spec.name}"
            )

    async def _finished(self, client: Client, view: RunView) -> Ending | None:
        """The ending of a complete run; none when the run may start (again)."""
        outcome = await outcome_of(client, view.run_id)
        if not isinstance(outcome, RunOutcome) or outcome.state is not RunState.COMPLETE:
            return None
        root = self._root_of(view)
        if self._place.stack is not None and not artifacts.exists(root, layout.WORKFLOW_JSON):
            self._say(f"{view.run_id} was complete, but {root} is gone; it starts over")
            return None
        was = view.memo.get("identity_sha256")
        changed = None if was is None else self._changed(was, root)
        if changed is not None:
            raise ConfigurationError(
                f"{self._loaded.path}: {view.run_id} is complete with another configuration: "
                f"{was} then, {self._loaded.identity} now{changed}; "
                "give this one another name and output.root"
            )
        progress = await progress_of(client, view.run_id)
        return await gather_ending(client, view, progress, root)

    def _root_of(self, view: RunView) -> str:
        return str(view.memo.get("root") or self._loaded.spec.output.root)

    def _changed(self, identity: str, root: str) -> str | None:
        """None when ``identity`` means what the run file means; else the keys that differ.

        The keys come from the run file that the root holds, where it is the one of ``identity``
        and within reach; otherwise they are not named.
        """
        if identity == self._loaded.identity:
            return None
        recorded = artifacts.read_json(root, layout.RESOLVED_CONFIG)
        if not isinstance(recorded, dict) or comparable_sha256(recorded) != identity:
            return ""
        if recorded_identity(recorded) == self._loaded.identity:
            return None
        return f" (different: {differences(recorded, self._loaded)})"

    async def _follow(self, client: Client) -> Ending:
        run_id = self._loaded.spec.run_id
        return await follow_to_end(
            client, run_id, self._loaded.spec.output.root, self._place, as_json=self._as_json
        )

    def _end(self, ending: Ending) -> int:
        return present(ending, self._place, again=self._again, as_json=self._as_json)

    def _leave(self) -> None:
        spec = self._loaded.spec
        if self._as_json:
            root = spec.output.root
            print_json({"run_id": spec.run_id, "state": RunState.PREPARING.value, "root": root})
        else:
            notice(f"follow it: {shlex.join(['perdure', 'run', *self._again])}")

    def _say(self, text: str) -> None:
        if not self._as_json:
            notice(text)


async def wait_for(place: Place, run_id: str, *, as_json: bool) -> int:
    """Follow a run that is known by its id only; returns its exit code."""
    client = await connect_to(place)
    view = await look(client, run_id)
    if view is None:
        raise ConfigurationError(f"{run_id}: the server knows no such run")
    ending = await follow_to_end(
        client, run_id, str(view.memo.get("root", "")), place, as_json=as_json
    )
    return present(ending, place, again=(), as_json=as_json)


async def follow_to_end(
    client: Client, run_id: str, root: str, place: Place, *, as_json: bool
) -> Ending:
    """Show the run until it closes and gather how it ended."""
    with _reporter(run_id, place, as_json=as_json) as reporter:
        view, progress = await follow(client, run_id, reporter)
    if not root and progress is not None and progress.run is not None:
        root = progress.run.root
    return await gather_ending(client, view, progress, root)


async def gather_ending(
    client: Client, view: RunView, progress: RunProgress | None, root: str
) -> Ending:
    """Everything that is known of a closed run: from the server and from its output root."""
    outcome = await outcome_of(client, view.run_id)
    exported = isinstance(outcome, RunOutcome) and outcome.export_hf is not None
    export = await export_report_of(client, view.run_id) if exported else None
    return await asyncio.to_thread(read_ending, view, progress, outcome, export, root)


def present(ending: Ending, place: Place, *, again: Sequence[str], as_json: bool) -> int:
    """Show an ending where it belongs; returns the exit code."""
    if as_json:
        print_json(ending.as_json())
    else:
        show_ending(out(), ending, again, place.ui)
    if ending.failure is not None and ending.exit_code != errors.DONE:
        for line in _failure_lines(ending):
            err().print(f"perdure: {line}", markup=False, soft_wrap=True)
    return ending.exit_code


def _failure_lines(ending: Ending) -> Sequence[str]:
    message = ending.failure.message if ending.failure else ""
    return [f"{ending.run_id}: {ending.state}: {line}" for line in message.splitlines()]


def _reporter(run_id: str, place: Place, *, as_json: bool) -> Reporter:
    if as_json or not out().is_terminal:
        return PlainReporter(err())
    return LiveReporter(out(), run_id, place.ui)
