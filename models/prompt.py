"""Prompts: the prepared row and the data position."""

from typing import Any

from pydantic import Field

from models.base import Carried, Frozen


class VerifierTarget(Frozen):
    """Which verifier scores a prompt, against what, and with which weight."""

    name: str
    target: str
    weight: float = 1.0


class PromptMetadata(Frozen):
    """Provenance of one prepared row (semantics of the prepared JSONL)."""

    prepared_sample_id: str
    """``task:split:row``; unique within a prepared data set."""
    source_dataset: str
    source_row: int
    query: str
    """The last user text, before the chat template."""
    verifiers: tuple[VerifierTarget, ...]
    run_prompt_tokens: int
    run_prompt_token_ids_sha256: str
    extra: dict[str, Any] = Field(default_factory=dict)
    """What a verifier needs beside the target (a gym entry's metadata, for example)."""


class PreparedPrompt(Frozen):
    """One line of ``prepared/data/{train,eval}.jsonl``."""

    input: str
    """The rendered prompt, chat template applied."""
    label: str
    prompt_token_ids: tuple[int, ...]
    metadata: PromptMetadata


class PromptDraw(Frozen):
    """A prompt handed out once: identity survives requeue, producer death and resume."""

    group_index: int
    """Unique over the run, grows with hand-out order."""
    first_sample_index: int
    """Index of the group's first sample; siblings follow consecutively."""
    epoch_id: int
    row: int
    """Row in the prepared training file."""
    prepared_sample_id: str
    requeues: int = 0
    """Attempts that failed for a serving reason, in this producer's life and before."""
    stale: int = 0
    """Times that its finished group was too old to train and the prompt was sampled again."""


class DataState(Carried):
    """Cursor and pending-prompt ledger, taken under one lock.

    Every draw that is not consumed by an update at or before the snapshot is in ``pending``, in
    hand-out order, whether it is waiting, generating or already scored.
    """

    schema_version: int = 1
    sample_offset: int = 0
    epoch_id: int = 0
    sample_group_index: int = 0
    sample_index: int = 0
    pending: tuple[PromptDraw, ...] = ()
    train_sha256: str = ""
    """Digest of the prepared training file that the cursor walks; resume refuses another one."""
