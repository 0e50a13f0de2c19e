"""Faults of a model folder that nobody would notice: the run learns nothing, or something else.

Reads configuration, tokenizer and the headers of the weight files; no weights.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models.errors import ConfigurationError
from workers.engines.native.model_files import safetensor_files
from workers.engines.sglang.own_head import require_own_head
from workers.preflight.finding import Finding
from workers.sources.model import describe_model

USABLE_DTYPES = frozenset(("BF16", "F16", "F32"))
NAMES_OF_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_QUESTION = [{"role": "user", "content": "What is 3 * 4?"}]
_ANSWER = "It is 12"


@dataclass(frozen=True, slots=True)
class Folder:
    """A model folder, read."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> safetensors data type, shape."""
    tokenizer: Any
    stop_ids: tuple[int, ...]

    @property
    def text_config(self) -> dict[str, Any]:
        """Of the decoder, in a configuration of several parts."""
        part: dict[str, Any] = self.config.get("text_config", self.config)
        return part


def examine_folder(path: Path) -> list[Finding]:
    """Every check of the folder ``path``; one finding when it cannot be read at all."""
    try:
        folder = _read(path)
    except ConfigurationError as error:
        return [Finding("model folder", "readable", error.message, False)]
    return [check(folder) for check in CHECKS]


def _read(path: Path) -> Folder:
    try:
        described = describe_model(path)
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        config = json.loads((path / "config.json").read_bytes())
        tensors = {}
        for file in safetensor_files(path):
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118  safe_open has no __iter__
                    part = opened.get_slice(name)
                    tensors[name] = (str(part.get_dtype()), tuple(part.get_shape()))
    except ConfigurationError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from error
    return Folder(path, config, tensors, tokenizer, described.eos_token_ids)


def _family(folder: Folder) -> Finding:
    kind = str(folder.config.get("model_type"))
    known = kind in CONFIG_MAPPING
    return Finding(
        "architecture", "known to transformers", f"{kind}{'' if known else ', unknown'}", known
    )


def _head(folder: Folder) -> Finding:
    """The head is the embedding, or has weights of its own; a tied Qwen3-MoE is served wrongly."""
    expected = f"{HEAD}, or tied to the embedding"
    try:
        require_own_head(folder.path, folder.config)
    except ConfigurationError as error:
        return Finding("head", expected, error.message, False)
    tied, own = bool(folder.text_config.get("tie_word_embeddings")), HEAD in folder.tensors
    if tied and own:
        seen = f"{HEAD} beside tie_word_embeddings = true: what is read depends on the program"
        return Finding("head", expected, seen, False)
    if not tied and not own:
        seen = f"no {HEAD} and tie_word_embeddings = false: it would be random"
        return Finding("head", expected, seen, False)
    return Finding("head", expected, "tied" if tied else "its own", True)


def _dtype(folder: Folder) -> Finding:
    told = folder.text_config.get("dtype") or folder.text_config.get("torch_dtype")
    named = NAMES_OF_DTYPES.get(str(told))
    stored = {dtype for dtype, _ in folder.tensors.values()}
    seen = f"{', '.join(sorted(stored))}; config.json says {told}"
    ok = len(stored) == 1 and stored <= USABLE_DTYPES and named in (None, *stored)
    return Finding("data type", "one of BF16, F16, F32, as config.json says", seen, ok)


def _vocabulary(folder: Folder) -> Finding:
    told, tokens = int(folder.text_config["vocab_size"]), len(folder.tokenizer)
    rows = folder.tensors.get(EMBEDDING, ("", (told,)))[1][0]
    ok = tokens <= told == rows
    seen = f"{tokens} tokens, vocab_size {told}, {rows} rows of embedding"
    return Finding("vocabulary", "tokens <= vocab_size = rows", seen, ok)


def _template(folder: Folder) -> Finding:
    """The prompt of a user's turn: it exists, ends where the answer starts, and has usable ids."""
    expected = "renders a turn, opens the next, ids below vocab_size"
    if not folder.tokenizer.chat_template:
        return Finding("chat template", expected, "none; use an instruction-tuned model", False)
    try:
        closed = _rendered(folder, _QUESTION, opened=False)
        text = _rendered(folder, _QUESTION, opened=True)
    except jinja2.TemplateError as error:
        return Finding("chat template", expected, f"refuses a user's turn: {error}", False)
    ids = folder.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids or not text.startswith(closed):
        return Finding("chat template", expected, f"an unusable prompt: {text[:60]!r}", False)
    largest = max(ids)
    ok = largest < int(folder.text_config["vocab_size"])
    opens = "opens the answer" if len(text) > len(closed) else "no opening of the answer"
    return Finding("chat template", expected, f"{len(ids)} ids up to {largest}, {opens}", ok)


def _end_of_turn(folder: Folder) -> Finding:
    """What the template writes after an answer must be what ends a response."""
    expected = f"one of the stop ids {list(folder.stop_ids)}"
    try:
        turns = [*_QUESTION, {"role": "assistant", "content": _ANSWER}]
        text = _rendered(folder, turns, opened=False) if folder.tokenizer.chat_template else ""
    except jinja2.TemplateError as error:
        return Finding("end of a turn", expected, f"the template refuses an answer: {error}", None)
    after = text.rpartition(_ANSWER)[2]
    if not after.strip():
        return Finding("end of a turn", expected, "the template closes no turn", None)
    ids = folder.tokenizer(after, add_special_tokens=False)["input_ids"]
    seen = f"{after.strip()[:40]!r} = {ids[:4]}"
    return Finding("end of a turn", expected, seen, bool(set(ids) & set(folder.stop_ids)))


def _eos(folder: Folder) -> Finding:
    own = folder.tokenizer.eos_token_id
    expected = f"the tokenizer's is one of the stop ids {list(folder.stop_ids)}"
    return Finding("end of sequence", expected, str(own), own in folder.stop_ids)


def _pad(folder: Folder) -> Finding:
    """Nothing is padded here; a wrong id still breaks other programs that read the export."""
    own, size = folder.tokenizer.pad_token_id, int(folder.text_config["vocab_size"])
    if own is None:
        return Finding("padding", "below vocab_size", "none", None)
    shared = ", which also ends a response" if own in folder.stop_ids else ""
    verdict = None if shared else True
    return Finding(
        "padding", "below vocab_size", f"{own}{shared}", verdict if own < size else False
    )


def _rendered(folder: Folder, turns: list[dict[str, str]], *, opened: bool) -> str:
    text: str = folder.tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=opened
    )
    return text


CHECKS: tuple[Callable[[Folder], Finding], ...] = (
    _family,
    _head,
    _dtype,
    _vocabulary,
    _template,
    _end_of_turn,
    _eos,
    _pad,
)
