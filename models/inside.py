"""Names of files that stay within the folder that they are in, whoever wrote them."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator


def require_inside(name: str) -> str:
    """``name``, a relative path with forward slashes that leads to no other folder.

    Raises:
        ValueError: it is empty, absolute, or goes up.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is no path inside its folder")
    return name


InnerPath = Annotated[str, AfterValidator(require_inside)]
"""A field that holds such a name."""
