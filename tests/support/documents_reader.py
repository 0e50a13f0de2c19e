"""Somebody who types what the documents say, in a checkout whose quick start takes seconds.

Everything is real: the command line, Temporal, Ray, the workers, the actors. Two things are not as
in a checkout: the environment is there already, and the recipe ``quickstart`` is the one for
continuous integration, cut down and renamed.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from documents import ROOT, blocks
from forked_program import ForkedProgram
from kill_harness import Stack

SHELL = re.compile(r"[<>|&;$]")
"""Marks of a line that only a shell understands."""
RUN, SECOND = "quickstart", "tiny-ci"
DEADLINE_S = 150.0
SMALL = {
    "hidden_size": "32",
    "num_layers": "1",
    "num_heads": "2",
    "num_kv_heads": "1\nmax_positions = 2048",
    "train_count": "512",
    "eval_count": "16",
    "params": "{ letters = 1 }",
    "rollout_batch_size": "4",
    "samples_per_prompt": "4",
    "global_batch_size": "8",
    "lr_warmup_init": "1e-5",
    "save_interval": "4",
    "max_context_length": "64\ncheckpoint_keep_every = 4",
}
"""Values of keys that make the recipe ``tiny-ci`` a run of seconds."""
STAND_INS = {
    RUN: {
        "name": f'"{RUN}"',
        "root": f'"runs/{RUN}"\nexport_hf = true',
        "warmup_accuracy": "0.05",
        "num_rollouts": "60",
    },
    SECOND: {"warmup_accuracy": "0", "num_rollouts": "1000000"},
}
"""The two runs of this place: one that ends, and one that goes on until it is stopped."""
WRITTEN = (
    ("README.md", "toml", "mine.toml"),
    ("docs/retraining.md", "toml", "weekly.toml"),
    ("docs/first-run.md", "python", "export-hf.py"),
)
"""Files that a reader writes from a block of a document that holds the name of the file."""
COPIED = ("scripts/quickstart", "deploy", "configs/recipes", "configs/run.schema.json")


class Reader:
    """A shell in a small checkout below ``folder``, and its embedded stack."""

    def __init__(self, folder: Path) -> None:
        self.stack = Stack(folder / "state")
        self.checkout = folder / "checkout"
        self._copy()
        programs = f"{self.checkout / '.venv/bin'}:{Path(sys.executable).parent}"
        self.stack.env["PATH"] = f"{programs}:{os.environ['PATH']}"
        self._program = ForkedProgram(self.stack.env)

    def _copy(self) -> None:
        for name in COPIED:
            source, target = ROOT / name, self.checkout / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        (self.checkout / "scripts/environment").write_text("perdure_environment() { :; }\n")
        recipes = self.checkout / "configs/recipes"
        recipe = (recipes / "tiny-ci.toml").read_text()
        for name, values in STAND_INS.items():
            (recipes / f"{name}.toml").write_text(changed(recipe, SMALL | values))
        for document, language, name in WRITTEN:
            block = next(b for b in blocks(ROOT / document, language) if Path(name).stem in b)
            (self.checkout / name).write_text(block)
        for name, question in (("seed", "ab="), ("held-out", "cd=")):
            row = {"prompt": question, "answer": question[1::-1]}
            (self.checkout / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        (self.checkout / "models").mkdir()
        (self.checkout / "models/base").symlink_to(self.checkout / "runs" / RUN / "prepared/hf")
        program = self.checkout / ".venv/bin/perdure"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m workers "$@"\n')
        program.chmod(0o755)

    def start(self) -> None:
        """Bring the stack up and start the run; it needs a while until it trains."""
        self.stack.up()
        self.must("perdure start configs/recipes/quickstart.toml")

    def close(self) -> None:
        """End what was started."""
        self._program.close()
        self.stack.down()

    def type(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run one command line, in a shell unless it is ``perdure`` with plain words."""
        if command.startswith("perdure ") and not SHELL.search(command):
            words = shlex.split(command)[1:]
            return self._program.run(words, self.checkout, self.stack.env)
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.checkout,
            env=self.stack.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def must(self, command: str) -> str:
        """Run one command line that has to succeed; returns its standard output."""
        done = self.type(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def until_trained(self, run: str) -> None:
        """Wait until an update of the run was done."""
        root = self.checkout / "runs" / run
        state, rows = root / "workflow.json", root / "checkpoints/updates.jsonl"
        deadline = time.monotonic() + DEADLINE_S
        while not rows.exists():
            ended = state.exists() and json.loads(state.read_bytes()).get("error")
            assert not ended, ended
            assert time.monotonic() < deadline, self.must(f"perdure status {run}")
            time.sleep(0.05)

    def engine_url(self) -> str:
        """Address of the run's engine."""
        (run,) = json.loads(self.must(f"perdure status {RUN} --json"))["runs"]
        return next(str(actor["url"]) for actor in run["actors"] if actor["role"] == "engine")


def changed(recipe: str, values: dict[str, str]) -> str:
    """The recipe with other values of some of its keys."""
    for key, value in values.items():
        line = re.compile(rf"^{key} = .*$", re.MULTILINE)
        assert len(line.findall(recipe)) == 1, f"tiny-ci.toml sets {key} not once"
        recipe = line.sub(f"{key} = {value}", recipe)
    return recipe
