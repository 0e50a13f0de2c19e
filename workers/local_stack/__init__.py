"""The embedded stack: a Temporal dev server, a Ray head and two workers, supervised.

One stack a user by default (``PERDURE_STATE_DIR`` chooses another). ``ensure_stack`` starts the
supervisor if none lives; the supervisor restarts whatever dies and outlives the command that
started it. Everything listens on loopback.
"""

from workers.local_stack.client import ensure_stack, stack_status, stop_stack
from workers.local_stack.state import ProcessStatus, StackInfo, StackStatus, state_dir

__all__ = [
    "ProcessStatus",
    "StackInfo",
    "StackStatus",
    "ensure_stack",
    "stack_status",
    "state_dir",
    "stop_stack",
]
