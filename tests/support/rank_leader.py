"""A trainer actor without Ray: ``python rank_leader.py ORDER``, then calls on standard input.

A call is a line of JSON {"call", "update", "collection"}; each answer is a line of JSON on standard
output, the first one that of ``start``.
"""

import json
import sys

from models.errors import PerdureError
from models.ids import FenceToken
from models.rollout import RolloutCollection
from workers.actors.order import ActorOrder
from workers.actors.trainer import TrainerActor


def main() -> None:
    actor = TrainerActor(ActorOrder.model_validate_json(sys.argv[1]))
    answers = sys.stdout
    sys.stdout = sys.stderr  # logs

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        actor.start(1, None, None)
    except PerdureError as error:
        answer(error=type(error).__name__, message=error.message)
        return
    answer(pids=list(actor._gang.pids) if actor._gang else [])
    for line in sys.stdin:
        call = json.loads(line)
        token = FenceToken(epoch=1, update=call.get("update", 0), attempt=1)
        try:
            if call["call"] == "optimize":
                collection = RolloutCollection.model_validate(call["collection"])
                report = actor.optimize(token, call["update"], collection)
                answer(policy_version=report.policy_version, metrics=report.metrics)
            elif call["call"] == "export":
                answer(path=actor.export_weights(token, call["version"]).path)
            elif call["call"] == "facts":
                answer(serving=actor.facts().serving)
            else:
                actor.close()
                answer(closed=True)
        except PerdureError as error:
            answer(error=type(error).__name__, message=error.message)


if __name__ == "__main__":
    main()
