"""Whether what an output root was prepared from may still change.

A start that fails before its first collection leaves a claimed root behind, perhaps with
``prepared/``. Nothing has been sampled or trained then, so the run file or its inputs may be put
right and the same command run again; what no longer fits is made anew.
"""

from activities.storage import layout
from activities.storage.store import Store


def is_settled(store: Store) -> bool:
    """Whether something was sampled: from then on prompts, model and run file stay as they are."""
    return any(store.exists(path) for path in (layout.ROLLOUTS, layout.CHECKPOINT_FOLDERS))
