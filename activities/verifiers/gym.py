"""``gym``: reasoning-gym's own scorer, in worker processes with a time budget.

The prompt's ``metadata.extra`` is the generator's entry: question, answer, and metadata that names
its ``source_dataset``. Scorers parse what a model wrote, some with an expression
evaluator, so they run outside this process: an answer that hangs or kills a worker ends as an
ERROR and the worker is replaced.
"""

import importlib.util
import sys

from activities.verifiers.base import error, invalid, score
from activities.verifiers.process_pool import ProcessPool, WorkerFailed
from models.errors import ConfigurationError
from models.prompt import PreparedPrompt, VerifierTarget
from models.sample import Verdict

BUDGET_S = 10.0
"""For one answer; scorers take milliseconds."""
START_S = 60.0
"""For a worker to import reasoning-gym, which takes seconds on a busy machine."""
NUM_WORKERS = 2


class GymVerifier:
    """Owns the worker processes; they start with the first answer."""

    def __init__(self, budget_s: float = BUDGET_S, num_workers: int = NUM_WORKERS) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigurationError(
                "the gym verifier needs the package reasoning-gym: install perdure[gym]"
            )
        command = (sys.executable, "-m", "activities.verifiers.gym_worker")
        self._pool = ProcessPool(command, num_workers, budget_s, START_S)

    async def verify(self, prompt: PreparedPrompt, target: VerifierTarget, text: str) -> Verdict:
        """The scorer's value in [0, 1]; ERROR when it failed or ran past its budget."""
        entry = prompt.metadata.extra
        if not {"answer", "metadata"} <= entry.keys():
            return error(target, "the prompt's metadata.extra is not a reasoning-gym entry")
        if not text.strip():
            return invalid(target, "empty answer")
        try:
            answer = await self._pool.call({"entry": entry, "text": text})
        except WorkerFailed as failure:
            return error(target, str(failure))
        if "error" in answer:
            return error(target, str(answer["error"]))
        return score(target, float(answer["score"]))

    async def aclose(self) -> None:
        """End the worker processes."""
        await self._pool.aclose()
