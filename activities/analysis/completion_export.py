"""Whether the final Hugging Face folder is finished and its weight files are whole."""

import json
from functools import partial
from typing import Any

from activities.analysis.completion import Check, Flaw, Root, try_read

_MARKER = ".complete"
_AGAIN = "remove the folder and export again from the last checkpoint, or restore it from a copy"
_LENGTH_BYTES = 8


def check_export(root: Root) -> Check:
    """Whether the export that the run file asks for is there, marked, with whole files.

    Whether a model library loads it is for those to try who have one.
    """
    if root.spec is None or not root.spec.output.export_hf:
        return Check("export", "none asked for")
    folder = root.spec.output.hf_dir
    names = root.store.list(folder, hidden=True)
    flaws = [
        Flaw(root.path(f"{folder}/{name}"), "missing", _AGAIN)
        for name in (_MARKER, "config.json")
        if name not in names
    ]
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights:
        flaws.append(Flaw(root.path(folder), "holds no *.safetensors", _AGAIN))
    tensors = 0
    for name in weights:
        rel = f"{folder}/{name}"
        found = try_read(partial(_num_tensors, root, rel))
        if isinstance(found, str):
            flaws.append(Flaw(root.path(rel), found, _AGAIN))
        else:
            tensors += found
    return Check("export", f"{folder}: {len(weights)} files, {tensors} tensors", tuple(flaws))


def _num_tensors(root: Root, rel: str) -> int:
    """Tensors that the header of a safetensors file names; ``ValueError`` when it is torn."""
    size = root.store.size(rel)
    length = int.from_bytes(root.store.read_head(rel, _LENGTH_BYTES), "little")
    if not 0 < length <= size - _LENGTH_BYTES:
        raise ValueError(f"torn: {size} bytes, a header of {length}")
    head = root.store.read_head(rel, _LENGTH_BYTES + length)
    header: dict[str, Any] = json.loads(head[_LENGTH_BYTES:])
    entries = [each for name, each in header.items() if name != "__metadata__"]
    wanted = _LENGTH_BYTES + length + max((each["data_offsets"][1] for each in entries), default=0)
    if size != wanted:
        raise ValueError(f"torn: {size} bytes, its header asks for {wanted}")
    return len(entries)
