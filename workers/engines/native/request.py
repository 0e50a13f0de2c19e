"""One generation request inside the engine, and what the model thread reports about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked sampling parameters of one request."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: tuple[int, ...]
    """Ids that end the response, EOS included; empty with ``ignore_eos``."""
    stop_strings: tuple[str, ...]
    seed: int

    @property
    def plain(self) -> bool:
        """Neither greedy nor restricted: the fast path of the sampler."""
        return self.temperature > 0 and self.top_p >= 1 and self.top_k < 0 and self.min_p <= 0


@dataclass(slots=True, eq=False)
class Request:
    """Life: waiting -> running in a slot -> finished; a retraction leads back to waiting."""

    rid: str
    input_ids: list[int]
    sampling: Sampling
    prompt_logprobs_from: int | None
    """First prompt token to score; None: none."""
    want_experts: bool
    stream: bool
    arrived: float
    """Monotonic seconds."""
    started: float = 0.0
    slot: int = -1
    num_retractions: int = 0
    cached_tokens: int = 0
    kept_ids: list[int] = field(default_factory=list)
    """Tokens from before the last retraction."""
    kept_logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[tuple[float | None, int]] | None = None
    prompt_key: tuple[int, ...] = ()
    context_length: int = 0
    """Prompt and kept tokens at admission."""

    @property
    def need(self) -> int:
        """KV positions that the finished request can occupy."""
        return len(self.input_ids) + self.sampling.max_new_tokens

    @property
    def known_length(self) -> int:
        """Prompt and tokens kept from before a retraction."""
        return len(self.input_ids) + len(self.kept_ids)

    @property
    def watched(self) -> bool:
        """Whether the tokens must be looked at after each step."""
        return self.stream or bool(self.sampling.stop_strings)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request, with everything that the answer needs."""

    finish_reason: dict[str, Any]
    output_ids: list[int]
    logprobs: list[float]
    weight_version: str
    was_admitted: bool
    experts: bytes | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of a streamed request."""

    output_ids: list[int]
    logprobs: list[float]
    weight_version: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The request did not or may not run; ``status`` is HTTP's."""

    status: int
    message: str


Event = Finished | Tokens | Refused
Emit = Callable[[Request, Event], None]


def aborted() -> dict[str, Any]:
    """SGLang's finish reason of a request that was aborted while it ran."""
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def aborted_in_queue() -> dict[str, Any]:
    """SGLang's finish reason of a request that was aborted before it ran."""
    return {"type": "abort", "message": "Abort in waiting queue"}
