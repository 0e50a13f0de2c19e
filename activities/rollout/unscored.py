"""Groups that no verifier could score: dropped one by one, fatal when there are too many."""

from models.errors import ContractViolation
from models.sample import SampleGroup

ERROR_FACTOR = 4
"""More groups than this many batches without a score mean that the verifier is broken."""


def complaint(group: SampleGroup) -> str:
    """Why ``group`` has no reward, in the words of the first verifier that failed."""
    details = [
        f"{verdict.name}: {verdict.detail}"
        for sample in group.samples
        for verdict in sample.verdicts
        if verdict.score != verdict.score
    ]
    return details[0] if details else "the weighted sum of scores is not finite"


def refuse_broken_verifier(unscored: int, limit: int, group: SampleGroup) -> None:
    """Raise ``ContractViolation`` when more than ``limit`` groups of a collection have no score.

    ``group`` is the last of them.
    """
    if unscored > limit:
        raise ContractViolation(
            f"{unscored} groups of one collection could not be scored; the last one, sample "
            f"{group.prepared_sample_id}: {complaint(group)}"
        )
