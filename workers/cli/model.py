"""``model tiny``: make a small model folder without a run."""

from pathlib import Path
from typing import Annotated

import typer

from configs.data import TaskSpec
from configs.model import TinySpec
from models.errors import ConfigurationError
from workers.cli.output import notice, out

group = typer.Typer(no_args_is_help=True, help="Make models.")


@group.callback()
def _group() -> None:
    """Make models."""


@group.command("tiny")
def tiny(
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to make.")],
    letters: Annotated[int, typer.Option(min=1, help="Letters of the reversed words.")] = 5,
    hidden_size: Annotated[int, typer.Option(min=16, help="Width.")] = 128,
    num_layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    num_heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    num_kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 2,
    warmup_accuracy: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Supervised warm-up stops here; 0: none.")
    ] = 0.15,
    seed: Annotated[int, typer.Option(min=0, help="Initialization and warm-up.")] = 0,
) -> None:
    """Make a tiny Qwen3 that has begun to learn reversing words, as a Hugging Face folder."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"--out {folder}: is not empty; name a new folder")
    spec = TinySpec(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        warmup_accuracy=warmup_accuracy,
        seed=seed,
    )
    task = TaskSpec(task="reverse_word", train_count=1, params={"letters": letters})
    # torch and transformers come with this module.
    from workers.sources.tiny import make_tiny

    make_tiny(spec, task, folder, notice=notice)
    out().print(str(folder), markup=False, soft_wrap=True)
