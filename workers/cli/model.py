"""``model tiny``: make a small model folder without a run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from configs.data import DataSection, TaskSpec
from configs.model import ModelSection, TinyArchitecture, TinySpec
from configs.model_checks import model_problems
from configs.problem import configuration_error
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
    architecture: Annotated[TinyArchitecture, typer.Option(help="Model family.")] = "qwen3",
    num_experts: Annotated[
        int | None, typer.Option(min=2, help="Experts of a layer; default 8.")
    ] = None,
    experts_per_token: Annotated[
        int | None, typer.Option(min=1, help="Experts of a token; default 2.")
    ] = None,
    moe_intermediate_size: Annotated[
        int | None, typer.Option(min=1, help="Inner width of an expert; default: the width.")
    ] = None,
    warmup_accuracy: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Supervised warm-up stops here; 0: none.")
    ] = 0.15,
    seed: Annotated[int, typer.Option(min=0, help="Initialization and warm-up.")] = 0,
) -> None:
    """Make a tiny model that has begun to learn reversing words, as a Hugging Face folder."""
    if folder.exists():
        raise ConfigurationError(f"--out {folder}: exists already; name a new folder")
    spec = TinySpec.model_validate(
        {
            "architecture": architecture,
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "num_experts": num_experts,
            "experts_per_token": experts_per_token,
            "moe_intermediate_size": moe_intermediate_size,
            "warmup_accuracy": warmup_accuracy,
            "seed": seed,
        }
    )
    problems = list(model_problems(ModelSection(source="tiny", tiny=spec), has_tasks=True))
    if problems:
        raise configuration_error("model tiny", problems)
    task = TaskSpec(task="reverse_word", train_count=1, params={"letters": letters})
    # Before torch is imported: spinning OpenMP threads on busy cores are many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from workers.sources.folders import staged
    from workers.sources.tasks import generate_questions
    from workers.sources.tiny import make_tiny_model, questions_needed

    needed = questions_needed(spec) if warmup_accuracy > 0 else 0
    questions = generate_questions(task, DataSection().seed, needed, 0)
    notice(f"making {num_layers} layers of width {hidden_size}, a minute at most")
    with staged(folder) as stage:
        report = make_tiny_model(stage, spec, questions.train)
    out().print(
        f"{folder}: {report.num_parameters:,} parameters, accuracy {report.accuracy:.2f} after "
        f"{report.batches} supervised batches",
        markup=False,
        soft_wrap=True,
    )
