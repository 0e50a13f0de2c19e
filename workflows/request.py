"""The workflow's input, as anybody may send it: one ``RunRequest``, or a configuration error.

The input is decoded without a type and parsed here, because an input that the data converter or
Python's own call refuses would leave a workflow task that fails for ever. Pure.
"""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from configs.explain import explain
from models.errors import ConfigurationError
from models.run import RunRequest

_REMEDY = "make it with: perdure config render RUN.toml"


def parse_request(inputs: Sequence[Any]) -> RunRequest:
    """The request that the workflow was started with; an empty one without an input.

    Raises:
        ConfigurationError: several inputs, or one that is no request.
    """
    if len(inputs) > 1:
        raise ConfigurationError(f"the workflow takes one input, not {len(inputs)}; {_REMEDY}")
    given = inputs[0] if inputs else {}
    if not isinstance(given, dict):
        found = type(given).__name__
        raise ConfigurationError(
            f"the workflow input must be a JSON object, not {found}; {_REMEDY}"
        )
    try:
        # JSON mode, as the data converter would: Python mode takes no list for a tuple.
        return RunRequest.model_validate_json(json.dumps(given))
    except ValidationError as error:
        problems = "; ".join(str(problem) for problem in explain(error))
        raise ConfigurationError(f"the workflow input is wrong: {problems}; {_REMEDY}") from None
