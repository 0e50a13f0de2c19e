"""From chat turns to token ids, through the prepared model's own tokenizer and chat template."""

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

import jinja2
from transformers import AutoTokenizer

from models.errors import ConfigurationError
from models.prompt import PreparedPrompt, PromptMetadata, VerifierTarget
from workers.sources.rows import SourceRow

_TOKENIZER_FILES = frozenset(
    (
        "added_tokens.json",
        "chat_template.json",
        "config.json",
        "merges.txt",
        "special_tokens_map.json",
        "vocab.json",
        "vocab.txt",
    )
)
_TOKENIZER_SUFFIXES = frozenset((".jinja", ".model", ".tiktoken"))


class PromptRenderer:
    """The tokenizer of one model folder."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(f"no usable tokenizer in {model_dir}: {reason}") from error
        if not self._tokenizer.chat_template:
            raise ConfigurationError(
                f"the tokenizer in {model_dir} has no chat template; use an instruction-tuned "
                "model, or add a chat_template.jinja to the model folder"
            )

    def prepare(
        self, split: str, rows: Sequence[SourceRow], max_context: int, max_response: int
    ) -> list[PreparedPrompt]:
        """Render and tokenize ``rows``; token ids are those of exactly the rendered text.

        Args:
            split: ``train`` or ``eval``, part of the ids and of messages.
            rows: in order; row n gets the id ``source:split:n``.
            max_context: tokens of prompt plus response; a longer prompt is refused, never cut.
            max_response: tokens of it that belong to the response.

        Raises:
            ConfigurationError: naming split and 1-based row.
        """
        texts = [self._render(f"{split} row {n} ({r.where})", r) for n, r in enumerate(rows, 1)]
        token_ids = self._tokenize(texts)
        prepared: list[PreparedPrompt] = []
        for index, (row, text, ids) in enumerate(zip(rows, texts, token_ids, strict=True)):
            if not ids or len(ids) + max_response > max_context:
                raise ConfigurationError(
                    f"{split} row {index + 1} ({row.where}): {len(ids)} prompt tokens and "
                    f"max_response_length {max_response} do not fit core.max_context_length "
                    f"{max_context}; shorten the prompt or the response, or raise the limit"
                )
            prepared.append(_prepared(split, index, row, text, ids))
        return prepared

    def _render(self, where: str, row: SourceRow) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(row.messages), tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ConfigurationError(
                f"{where}: the chat template in {self._model_dir} refuses it: {error}"
            ) from error
        if not text.strip():
            raise ConfigurationError(f"{where}: the rendered prompt is empty")
        return str(text)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return encoded


def token_ids_sha256(token_ids: Sequence[int]) -> str:
    """SHA-256 hex over the ids as little-endian 32-bit integers."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).hexdigest()


def tokenizer_digests(model_dir: Path) -> dict[str, str]:
    """SHA-256 of every file of the folder that decides how text becomes tokens, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(model_dir.iterdir())
        if path.is_file() and _decides_tokens(path)
    }


def _decides_tokens(path: Path) -> bool:
    return (
        path.name.startswith("tokenizer")
        or path.name in _TOKENIZER_FILES
        or path.suffix in _TOKENIZER_SUFFIXES
    )


def _prepared(split: str, index: int, row: SourceRow, text: str, ids: list[int]) -> PreparedPrompt:
    metadata = PromptMetadata(
        prepared_sample_id=f"{row.source}:{split}:{index}",
        source_dataset=row.source,
        source_row=row.source_row,
        query=row.query,
        verifiers=(VerifierTarget(name=row.verifier, target=row.label),),
        run_prompt_tokens=len(ids),
        run_prompt_token_ids_sha256=token_ids_sha256(ids),
        extra=row.extra,
    )
    return PreparedPrompt(
        input=text, label=row.label, prompt_token_ids=tuple(ids), metadata=metadata
    )
