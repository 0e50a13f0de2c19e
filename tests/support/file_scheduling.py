"""Which tests pytest-xdist gives to one worker: those of a file, and all that start a Ray cluster.

A file's tests share what its fixtures start. A Ray cluster takes seconds to start and the memory of
a small machine to run, so one worker goes through all of them, while the others do the rest.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

CLUSTERS = ("tests/docs/", "tests/ray/", "tests/chaos/")


class FileScheduling(LoadScopeScheduling):
    """Units of work in the order of collection, where tests with clusters come first."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return "clusters" if nodeid.startswith(CLUSTERS) else nodeid.partition("::")[0]


def clusters_first(items: list[pytest.Item]) -> None:
    """The longest unit of work has to be begun first."""
    items.sort(key=lambda item: not item.nodeid.startswith(CLUSTERS))
