"""A model that SGLang would serve wrongly without a word."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import ConfigurationError


def require_own_head(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a tied Qwen3-MoE: SGLang leaves its head unset and serves uniform logits.

    Args:
        folder: for the message.
        config: content of its ``config.json``.

    Raises:
        ConfigurationError: with the change that makes it servable.
    """
    if config.get("model_type") == "qwen3_moe" and config.get("tie_word_embeddings"):
        raise ConfigurationError(
            f"{folder}/config.json: tie_word_embeddings = true: SGLang serves uniform logits from "
            "a qwen3_moe with a tied head; write the embedding a second time as "
            "lm_head.weight and set tie_word_embeddings to false"
        )
