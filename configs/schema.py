"""JSON Schema of the run file, for editors and other tools."""

import inspect
from typing import Any

from configs.run import RunSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The run file as JSON Schema, draft 2020-12; each key carries its description."""
    schema = RunSpec.model_json_schema()
    _unwrap_descriptions(schema)
    return {"$schema": DIALECT, **schema, "title": "Perdure run file"}


def _unwrap_descriptions(node: Any) -> None:
    """Docstrings are wrapped for the source; an editor wraps by itself."""
    if isinstance(node, dict):
        description = node.get("description")
        if isinstance(description, str):
            paragraphs = inspect.cleandoc(description).split("\n\n")
            node["description"] = "\n\n".join(" ".join(text.split()) for text in paragraphs)
        for inner in node.values():
            _unwrap_descriptions(inner)
    elif isinstance(node, list):
        for inner in node:
            _unwrap_descriptions(inner)
