"""Which files of an HF folder hold the weights. Imports no torch: start-up checks use it."""

import json
from pathlib import Path

from models.errors import ConfigurationError
from models.inside import require_inside


def safetensor_files(folder: Path) -> list[Path]:
    """The weight files of an HF folder: the index's shards, else every ``*.safetensors``.

    Raises ConfigurationError for a folder that does not exist or holds no weights.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"model folder {folder} does not exist")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            names = sorted({require_inside(name) for name in shards})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{index} is not a safetensors index: {error}") from error
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise ConfigurationError(f"{folder}: shards named by the index are missing: {absent[:3]}")
    if not files:
        raise ConfigurationError(f"{folder} has no weights: no *.safetensors file in it")
    return files
