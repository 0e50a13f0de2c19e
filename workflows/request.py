"""A workflow's input, as anybody may send it: one request, or a configuration error.

The input is decoded without a type and parsed here, because an input that the data converter or
Python's own call refuses would leave a workflow task that fails for ever. Pure.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from configs.explain import explain
from models.errors import ConfigurationError
from models.run import RunRequest

Request = TypeVar("Request", bound=BaseModel)


def parse_request(inputs: Sequence[Any]) -> RunRequest:
    """The request that a run was started with; an empty one without an input.

    Raises:
        ConfigurationError: several inputs, or one that is no request.
    """
    return parse_input(inputs, RunRequest, "make it with: perdure config render RUN.toml")


def parse_input(inputs: Sequence[Any], kind: type[Request], remedy: str) -> Request:
    """The one input as a ``kind``; an empty one without an input.

    Raises:
        ConfigurationError: several inputs, or one that is no ``kind``; it ends in ``remedy``.
    """
    if len(inputs) > 1:
        raise ConfigurationError(f"the workflow takes one input, not {len(inputs)}; {remedy}")
    given = inputs[0] if inputs else {}
    if not isinstance(given, dict):
        found = type(given).__name__
        raise ConfigurationError(f"the workflow input must be a JSON object, not {found}; {remedy}")
    try:
        # JSON mode, as the data converter would: Python mode takes no list for a tuple.
        return kind.model_validate_json(json.dumps(given))
    except ValidationError as error:
        problems = "; ".join(str(problem) for problem in explain(error))
        raise ConfigurationError(f"the workflow input is wrong: {problems}; {remedy}") from None
