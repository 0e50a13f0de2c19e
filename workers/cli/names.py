"""How a run is named on the command line: a run file, a run id, the name alone, or its root."""

from collections.abc import Iterable
from pathlib import Path

from configs.load import load_run

PREFIX = "train/"


def run_id_of(text: str) -> str:
    """The workflow id that ``text`` means.

    A path of an existing file, or anything ending in ``.toml`` or ``.json``, is loaded for its
    ``name``; ``train/NAME`` is an id; anything else is a name.

    Raises:
        ConfigurationError: the file is missing or wrong.
    """
    if text.startswith(PREFIX):
        return text
    if is_run_file(text):
        return load_run(text).spec.run_id
    return f"{PREFIX}{text}"


def is_run_file(text: str) -> bool:
    """Whether ``text`` names a run file, there or not."""
    return text.endswith((".toml", ".json")) or Path(text).is_file()


def root_of(text: str) -> str:
    """The output root that ``text`` means: that of a run file, or ``text`` itself.

    Raises:
        ConfigurationError: the run file is missing or wrong.
    """
    if is_run_file(text):
        return load_run(text).spec.output.root
    return text


def as_options(overrides: Iterable[str]) -> list[str]:
    """Overrides as command-line words."""
    return [word for override in overrides for word in ("--set", override)]
