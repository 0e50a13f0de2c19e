"""The preparation actor: makes model and data of a run in a process of its own, then ends.

Making a model needs torch and may need gigabytes; neither must stay behind in a worker.
"""

from activities.site import spec_of, store_of
from activities.storage import layout
from activities.storage.local_copy import has_folder
from activities.storage.store import Store
from configs.run import RunSpec
from models.base import Carried
from models.ids import RunRef
from workers.actors.order import ActorOrder, enter, num_cores
from workers.sources.folders import is_as_made


class PreparedRun(Carried):
    """Facts of the prepared model and data that actors need without loading either."""

    spec_sha256: str
    num_parameters: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    train_prompts: int
    eval_prompts: int


def find_prepared(store: Store, spec_sha256: str) -> PreparedRun | None:
    """The report of a preparation for exactly this run file; None when it must be made.

    Also None when a file of the model was lost or has another size: whoever prepares says so. On
    an object store who downloads one finds that out.
    """
    if not all(store.exists(path) for path in (layout.PREPARED_REPORT, layout.MANIFEST_JSON)):
        return None
    if not has_folder(store, layout.PREPARED_MODEL):
        return None
    if store.is_local and not is_as_made(store.local_path(layout.PREPARED_MODEL)):
        return None
    report = PreparedRun.model_validate(store.read_json(layout.PREPARED_REPORT))
    return report if report.spec_sha256 == spec_sha256 else None


class PreparationActor:
    """Sync actor with one call."""

    def __init__(self, order: ActorOrder) -> None:
        self._order = order
        self._spec = spec_of(order.run)
        enter(order, self._spec, num_cores())

    def prepare(self) -> PreparedRun:
        """Make model and data, or find them made; what exists is checked against the run file.

        Raises:
            ConfigurationError: source or data are unusable, or made from something else.
        """
        return prepare_run(self._order.run, self._spec)


def prepare_run(run: RunRef, spec: RunSpec) -> PreparedRun:
    """Make model and data in this process, which imports torch for it; see the actor."""
    from workers.sources.model import prepare_model
    from workers.sources.prompts import prepare_data

    store = store_of(run)
    model = prepare_model(spec, store)
    data = prepare_data(spec, store, model.path)
    report = PreparedRun(
        spec_sha256=run.spec_sha256,
        num_parameters=model.num_parameters,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        train_prompts=data.train_prompts,
        eval_prompts=data.eval_prompts,
    )
    store.write_json(layout.PREPARED_REPORT, report.model_dump(mode="json"))
    return report
