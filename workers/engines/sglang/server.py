"""SGLang's HTTP server with our scheduler process and pause, and refusals told from failures.

Runs in the interpreter that has SGLang, so it imports little else of Perdure. Exit status 2: the
model or an argument is refused, and another start would be refused as well.
"""

import os
import sys
from typing import Any

REFUSED_STATUS = 2


def main(arguments: list[str], model: str) -> None:
    """Serve until a signal or a failure; ``arguments`` are those of SGLang's command line."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from workers.engines.sglang.pausing import prompt_pause
    from workers.engines.sglang.scheduler import run_scheduler

    load_plugins()
    TokenizerManager.pause_generation = prompt_pause(TokenizerManager.pause_generation)
    try:
        load_model_files(model)
        server_args = with_key(prepare_server_args([*arguments, *key_arguments()]))
    except (ValueError, AssertionError, NotImplementedError, OSError) as error:
        sys.stderr.write(f"error: SGLang refuses: {type(error).__name__}: {error}\n")
        sys.exit(REFUSED_STATUS)
    try:
        launch_server(server_args, run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


class HiddenKey(str):
    """A key that SGLang's log of its own arguments does not show."""

    def __repr__(self) -> str:
        return "'***'"


def key_arguments() -> list[str]:
    """The token of the environment as SGLang's keys, for all calls; its children lose it."""
    token = os.environ.pop("PERDURE_ENGINE_TOKEN", "")
    return ["--api-key", token, "--admin-api-key", token] if token else []


def with_key(server_args: Any) -> Any:
    """``server_args`` with keys that are not written into logs."""
    for name in ("api_key", "admin_api_key"):
        key = getattr(server_args, name, None)
        if key:
            # Assigning to arguments that are resolved is refused, also where nothing changes.
            object.__setattr__(server_args, name, HiddenKey(key))
    return server_args


def load_model_files(folder: str) -> None:
    """Read configuration and tokenizer once, before there are children.

    Generated model code then lies in the cache of this server; children that made it at the same
    time would race each other.

    Raises:
        OSError, ValueError: as transformers says what is wrong with the folder.
    """
    from transformers import AutoConfig, AutoTokenizer

    AutoConfig.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
