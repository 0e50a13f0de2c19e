"""Nearest valid names for what was probably meant."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic.fields import FieldInfo

from configs.run import RunSpec
from configs.section import Section

_ELSEWHERE = {
    "asynchronous": "the table is called [async]",
    "max_weight_staleness": "the limit is core.max_policy_lag, in optimizer steps",
    "max_staleness": "the limit is core.max_policy_lag, in optimizer steps",
    "engine_drain_timeout": "it is inference.drain_timeout_s",
    "engine_update_timeout": "it is inference.update_timeout_s",
    "refresh_request_timeout": "it is inference.request_timeout_s",
    "off_policy_correction": "it is training.use_tis",
    "use_kl_loss": "training.kl_loss_coef above 0 turns the KL term on",
    "ref_load": "the reference of training.kl_loss_coef is the prepared model",
    "calculate_per_token_loss": 'it is training.loss_aggregation = "token"',
    "lr_warmup_fraction": "the warm-up is optimizer.lr_warmup_steps, in optimizer steps",
    "lr_warmup_iters": "it is optimizer.lr_warmup_steps",
    "lr_decay_iters": "it is optimizer.lr_decay_steps",
    "lr_wsd_decay_iters": "it is optimizer.lr_wsd_decay_steps",
    "lr_decay_style": "it is optimizer.lr_schedule",
    "moe": "a tiny mixture of experts is described in [model.tiny], any other by its own files",
    **dict.fromkeys(("num_gpus_per_node", "gpus_per_replica"), "it is placement.gpus_per_node"),
    **dict.fromkeys(
        ("num_gpus", "num_ranks", "num_workers", "world_size"), "it is trainer.num_processes"
    ),
    **dict.fromkeys(
        ("placement_mode", "colocate", "colocated", "disaggregated"),
        'it is placement.mode = "colocated" or "disaggregated"',
    ),
}
"""What other trainers call a thing, and what to write here. Wins over names that look alike."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word`` in any case of letters, or none when nothing is close."""
    names = {name.lower(): name for name in candidates}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return names[found[0]] if found else None


def unknown_key_hint(table: Sequence[str | int], key: str) -> str:
    """What to write instead of the unknown ``key`` in ``table``.

    A name that is known from elsewhere wins; then a near name of the same table; else the tables
    that do have that key; else all keys of the table.
    """
    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    section = section_at(table)
    names = list(keys_of(section)) if section is not None else []
    close = nearest(key, names)
    if close is not None:
        return f"did you mean {close!r}?"
    owners = [path for path, owner in tables() if key in keys_of(owner)]
    if owners:
        return "it belongs in " + " or ".join(
            f"[{path}]" if path else "no table" for path in owners
        )
    return f"valid keys here: {', '.join(names)}" if names else ""


def section_at(location: Sequence[str | int]) -> type[Section] | None:
    """The schema of the table at ``location``; none where no table of the schema is."""
    section: type[Section] | None = RunSpec
    for part in location:
        if isinstance(part, int):
            continue
        fields = keys_of(section) if section is not None else {}
        if part not in fields:
            return None
        section = _section_of(fields[part].annotation)
    return section


def keys_of(section: type[Section]) -> Mapping[str, FieldInfo]:
    """The fields of a table under the names that a run file gives them."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def tables() -> Iterator[tuple[str, type[Section]]]:
    """Every table of the schema as (dotted path, class), the whole file first as ``""``."""
    yield from _walk("", RunSpec)


def leaf_keys() -> Iterator[str]:
    """Every key of the schema that is not itself a table, dotted."""
    for path, section in tables():
        for name, field in keys_of(section).items():
            if _section_of(field.annotation) is None:
                yield f"{path}.{name}" if path else name


def _walk(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    yield path, section
    for name, field in keys_of(section).items():
        inner = _section_of(field.annotation)
        if inner is not None:
            yield from _walk(f"{path}.{name}" if path else name, inner)


def _section_of(annotation: Any) -> type[Section] | None:
    """The section class inside an annotation such as ``tuple[TaskSpec, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for argument in get_args(annotation):
        found = _section_of(argument)
        if found is not None:
            return found
    return None
