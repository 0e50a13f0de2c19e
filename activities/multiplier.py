"""The infrastructure multiplier: one factor on the time-outs of slow clusters.

It comes from the worker's environment, because it says something about a place and nothing about
what a run means.
"""

import math
import os
from collections.abc import Mapping

from models.errors import ConfigurationError

NAMES = ("PERDURE_INFRA_TIMEOUT_MULTIPLIER", "MILES_INFRA_TIMEOUT_MULTIPLIER")
"""Either name; both with different values are refused."""


def scaled(seconds: float) -> float:
    """A deadline of infrastructure, made longer by the multiplier; see below for what it raises."""
    return seconds * infra_timeout_multiplier()


def infra_timeout_multiplier(environment: Mapping[str, str] | None = None) -> float:
    """The factor, 1.0 when unset. ``ConfigurationError`` unless it is finite and at least 1."""
    variables = os.environ if environment is None else environment
    given = {name: variables[name] for name in NAMES if variables.get(name)}
    if len(set(given.values())) > 1:
        raise ConfigurationError(f"{given}: set one of these, or both to the same value")
    if not given:
        return 1.0
    name, text = next(iter(given.items()))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 1:
        raise ConfigurationError(f"{name} is {text!r}; it must be a finite number of at least 1")
    return value
