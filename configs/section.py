"""Base of every run-file section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A closed table of the run file: unknown keys are refused, types are not coerced.

    Every field has a docstring; it becomes the description in the JSON Schema.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
