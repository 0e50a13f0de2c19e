"""``gpu-usage``: sample the GPUs of this machine beside a run."""

import math
from pathlib import Path
from typing import Annotated

import typer

from models.errors import ConfigurationError
from workers.cli.output import notice

MIN_INTERVAL_S = 1.0


def gpu_usage(
    output: Annotated[
        str,
        typer.Argument(metavar="OUTPUT", help="JSONL file; ROOT/checkpoints/gpu_usage_NODE.jsonl."),
    ],
    seconds: Annotated[float, typer.Option(help="How long to sample.")] = 10800.0,
    interval: Annotated[float, typer.Option(help="Seconds between two looks, at least 1.")] = 5.0,
    triton_cache_parent: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also count compiled kernels in each folder of DIR."),
    ] = None,
) -> None:
    """Append use and memory of every GPU of this machine to OUTPUT, for `perdure analyze`.

    Asks the driver only and takes no GPU memory. End it early with Ctrl-C; rows stay.
    """
    # fsspec is slow to import; other verbs do without it.
    from workers.gpu_samples import sample_gpus
    from workers.nvml import Nvml

    _check("--seconds", seconds, seconds > 0, "more than 0")
    _check("--interval", interval, interval >= MIN_INTERVAL_S, f"at least {MIN_INTERVAL_S:g}")
    if triton_cache_parent is not None and not triton_cache_parent.is_dir():
        raise ConfigurationError(f"--triton-cache-parent {triton_cache_parent}: no such folder")
    try:
        with Nvml() as nvml:
            rows = sample_gpus(
                output,
                nvml.look,
                seconds=seconds,
                interval=interval,
                triton_cache_parent=triton_cache_parent,
            )
    except (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        raise ConfigurationError(
            f"{output} cannot be written: {error.strerror}; name a file that you may write to"
        ) from error
    notice(f"{rows} rows in {output}")


def _check(option: str, value: float, is_right: bool, rule: str) -> None:
    if not math.isfinite(value) or not is_right:
        raise ConfigurationError(f"{option} {value}: must be a finite number of seconds, {rule}")
