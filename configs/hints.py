"""Nearest valid names for what was probably meant."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from configs.run import RunSpec
from configs.section import Section


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, or none when nothing is close."""
    found = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown_key_hint(table: Sequence[str | int], key: str) -> str:
    """What to write instead of the unknown ``key`` in ``table``.

    A near name of the same table wins; else the tables that do have that key; else all keys of
    the table.
    """
    section = section_at(table)
    names = list(section.model_fields) if section is not None else []
    close = nearest(key, names)
    if close is not None:
        return f"did you mean {close!r}?"
    owners = [path for path, owner in tables() if key in owner.model_fields]
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
        if section is None or part not in section.model_fields:
            return None
        section = _section_of(section.model_fields[part].annotation)
    return section


def tables() -> Iterator[tuple[str, type[Section]]]:
    """Every table of the schema as (dotted path, class), the whole file first as ``""``."""
    yield from _walk("", RunSpec)


def leaf_keys() -> Iterator[str]:
    """Every key of the schema that is not itself a table, dotted."""
    for path, section in tables():
        for name, field in section.model_fields.items():
            if _section_of(field.annotation) is None:
                yield f"{path}.{name}" if path else name


def _walk(path: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    yield path, section
    for name, field in section.model_fields.items():
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
