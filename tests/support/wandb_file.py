"""Reads an offline W&B file: a log of protobuf records in blocks of 32 KiB.

Framing as in https://github.com/google/leveldb/blob/main/doc/log_format.md, after a header of seven
bytes.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_HEADER = 7
_BLOCK = 1 << 15
_FRAME = struct.Struct("<IHB")  # checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last


def records(path: Path) -> Iterator[Record]:
    """Every record of the file."""
    content = path.read_bytes()
    position, parts = _HEADER, b""
    while position + _FRAME.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _FRAME.size:
            position += left
            continue
        _, length, kind = _FRAME.unpack_from(content, position)
        position += _FRAME.size
        parts += content[position : position + length]
        position += length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    """The logged rows in order, without W&B's own columns."""
    rows = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records(path)
        if record.HasField("history")
    ]
    return [
        {name: value for name, value in row.items() if not name.startswith("_")} for row in rows
    ]


def axes(path: Path) -> dict[str, str]:
    """Glob of metric names -> the metric that they are plotted against."""
    return {
        record.metric.glob_name: record.metric.step_metric
        for record in records(path)
        if record.HasField("metric") and record.metric.glob_name
    }
