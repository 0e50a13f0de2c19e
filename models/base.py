"""The one base class of every type that crosses a process boundary."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable message. Unknown fields are refused, so a typo never travels."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Carried(BaseModel):
    """State that outlives a deployment (workflow inputs, markers): unknown fields are ignored.

    A newer worker may read what an older one wrote and the other way round; every field that is
    added later therefore needs a default.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
