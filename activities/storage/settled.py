"""Whether what an output root was prepared from may still change.

A start that fails while it prepares leaves a claimed root behind, perhaps with a part of
``prepared/``. Nothing has been sampled or trained then, so the run file or its inputs may be put
right and the same command run again; what is left of the failed start is made anew.
"""

from activities.storage import layout
from activities.storage.store import Store


def is_settled(store: Store) -> bool:
    """Whether preparation was finished once: from then on prompts and model stay as they are.

    Samples and checkpoints settle a root as well, should the report be lost.
    """
    return any(
        store.exists(path)
        for path in (layout.PREPARED_REPORT, layout.ROLLOUTS, layout.CHECKPOINT_FOLDERS)
    )
