"""Reference of the run file for people: every key with its type, range, default and meaning."""

from collections.abc import Iterator, Mapping
from typing import Any

from configs.hints import tables
from configs.schema import json_schema

INTRODUCTION = """\
# Configuration

Every key of a run file. This page is written by `perdure config reference`; the texts are those of
`perdure config schema`, which editors read.

- A run file is TOML or JSON. `--set KEY=VALUE` wins over the file, the file over the default.
- An empty default is no value: leave the key out (in JSON also `null`). The last column says what
  then holds.
- Unknown keys are refused with the nearest name, and types are not coerced: `"3"` is no integer.
- `perdure validate FILE` also checks what keys say together, and `perdure plan FILE` prints what
  the run would do with every default filled in.
- Environment variables never change what a run means.
"""
HEAD = "| key | value | default | meaning |\n|---|---|---|---|\n"
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def reference() -> str:
    """The whole page as Markdown, a table of keys for each table of the run file."""
    schema = json_schema()
    nodes = {"": schema} | dict(_nodes("", schema, schema["$defs"]))
    return INTRODUCTION + "".join(_section(path, nodes[path]) for path, _ in tables())


def _nodes(
    path: str, node: Mapping[str, Any], defs: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every table below ``node`` with its dotted path."""
    for name, value in node["properties"].items():
        inner = _table_of(value, defs)
        if inner is not None:
            below = f"{path}.{name}" if path else name
            yield below, {**inner, "repeated": value.get("type") == "array"}
            yield from _nodes(below, inner, defs)


def _table_of(value: Mapping[str, Any], defs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The table that a key holds: itself, one or none, or a list of them."""
    for each in (value, *value.get("anyOf", ()), value.get("items", {})):
        if "$ref" in each:
            table: Mapping[str, Any] = defs[each["$ref"].rpartition("/")[2]]
            return table
    return None


def _section(path: str, node: Mapping[str, Any]) -> str:
    required = node.get("required", ())
    rows = [
        f"| `{key}` | {_kind(value)} | {_default(value, key in required)} | {_text(value)} |\n"
        for key, value in node["properties"].items()
        if _is_plain(value)
    ]
    title = f"[[{path}]]" if node.get("repeated") else f"[{path}]"
    heading = f"`{title}`" if path else "Outside every table"
    about = _about(node, title) if path else ""
    return f"\n## {heading}\n\n{about}{HEAD}{''.join(rows)}"


def _is_plain(value: Mapping[str, Any]) -> bool:
    inner = (value, *value.get("anyOf", ()), value.get("items", {}))
    return not any("$ref" in each for each in inner)


def _about(node: Mapping[str, Any], title: str) -> str:
    """What a table's docstring says beside its name."""
    text = node["description"].removeprefix(f"``{title}``").lstrip(":;. ")
    return f"{_marked(text[0].upper() + text[1:])}\n\n" if text else ""


def _kind(value: Mapping[str, Any]) -> str:
    kinds = [each for each in value.get("anyOf", [value]) if each.get("type") != "null"]
    return " or ".join(map(_one_kind, kinds))


def _one_kind(value: Mapping[str, Any]) -> str:
    if "const" in value:
        return _shown(value["const"])
    if "enum" in value:
        return ", ".join(map(_shown, value["enum"]))
    kind = str(value["type"])
    name = {"object": "table", "array": "list", "boolean": "true or false"}.get(kind, kind)
    if kind in ("integer", "number"):
        name += "".join(f", {word} {value[key]}" for key, word in BOUNDS.items() if key in value)
    return name + (f" like `{value['pattern']}`" if "pattern" in value else "")


def _default(value: Mapping[str, Any], required: bool) -> str:
    if required:
        return "**required**"
    default = value.get("default", {} if value.get("type") == "object" else None)
    return "" if default is None else _shown(default)


def _shown(value: Any) -> str:
    """A value as a run file writes it, as code."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _text(value: Mapping[str, Any]) -> str:
    return _marked(value["description"]).replace("|", "\\|")


def _marked(text: str) -> str:
    """Code marks of docstrings as those of Markdown."""
    return text.replace("``", "`")
