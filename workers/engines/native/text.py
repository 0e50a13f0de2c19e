"""Token ids to text and back, by the model folder's ``tokenizer.json``. Loaded at first use."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextCodec:
    """Wraps an optional tokenizer; without one, text is empty and stop strings are refused."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"

    @property
    def available(self) -> bool:
        """Whether the model folder has a tokenizer."""
        return self._file.is_file()

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        # Not at module level: most runs read token ids only and start faster without it.
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._file))

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` with the tokenizer's own special tokens."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; empty without a tokenizer."""
        if not self.available or not ids:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def matched_string(self, strings: Sequence[str], tail: list[int]) -> str | None:
        """The first of ``strings`` that occurs in the text of ``tail``."""
        text = self.decode(tail)
        return next((string for string in strings if string in text), None)
