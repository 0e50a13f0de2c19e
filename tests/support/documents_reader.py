"""Somebody who types what the documents say, in a checkout whose quick start takes seconds.

Everything is real: the command line, Temporal, Ray, the workers, the actors. Two things are not as
in a checkout: the environment is there already, and the recipes ``quickstart`` and ``tiny`` are the
one for continuous integration, cut down and renamed; so is the run file of the README.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from contextlib import ExitStack
from pathlib import Path

from code_service import code_service
from documents import ROOT, blocks
from forked_program import ForkedProgram
from kill_harness import Stack
from terminal import DEADLINE_S, POLL_S, Going, Terminal

from workers.local_stack import stack_status
from workers.local_stack.ports import free_port
from workers.local_stack.state import StackInfo, ray_token

SHELL = re.compile(r"[<>|&;$]")
"""Marks of a line that only a shell understands."""
RUN, SECOND, BESIDE = "quickstart", "tiny-ci", "tiny"
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
    BESIDE: {
        "name": f'"{BESIDE}"',
        "root": f'"runs/{BESIDE}"',
        "warmup_accuracy": "0",
        "num_rollouts": "2",
        "server_concurrency": '128\n[evaluation]\nmode = "background"\ninitial = false',
    },
}
"""The runs of this place: one that ends, one that goes on until it is stopped, and a short one that
is evaluated in background."""
MINE = {
    "source": '"models/base"',
    "train_count": "16",
    "eval_count": "4",
    "num_rollouts": "5\nrollout_batch_size = 4\nsamples_per_prompt = 4",
    "learning_rate": "2e-5\n[trainer]\nnum_threads = 1\n"
    "[inference]\nnum_threads = 1\nmax_response_length = 8",
}
"""The same for the run file of the README, which goes on from what the first run prepared."""
WRITTEN = (
    ("README.md", "toml", "mine.toml"),
    ("docs/retraining.md", "toml", "weekly.toml"),
    ("docs/first-run.md", "python", "export-hf.py"),
)
"""Files that a reader writes from a block of a document that holds the name of the file."""
COPIED = (
    *("scripts/quickstart", "scripts/gpu_scale.sh", "deploy", "configs/recipes"),
    *("configs/run.schema.json", ".pre-commit-config.yaml"),
)


class Reader:
    """A shell in a small checkout below ``folder``, and its embedded stack."""

    def __init__(self, folder: Path) -> None:
        self.stack = Stack(folder / "state")
        self.checkout = folder / "checkout"
        self._copy()
        programs = f"{self.checkout / '.venv/bin'}:{Path(sys.executable).parent}"
        self.stack.env["PATH"] = f"{programs}:{os.environ['PATH']}"
        self.terminal = Terminal(self.checkout, self.stack.env)
        self._phase: object = None
        self._early: dict[str, Going] = {}
        self._program = ForkedProgram(self.stack.env)
        self._ends = ExitStack()
        self._ends.callback(self.stack.down)
        self._ends.callback(self._program.close)

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
        mine = self.checkout / "mine.toml"
        mine.write_text(changed(mine.read_text(), MINE))
        for name, question in (("seed", "ab="), ("held-out", "cd=")):
            row = {"prompt": question, "answer": question[1::-1]}
            (self.checkout / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        (self.checkout / "models").mkdir()
        (self.checkout / "models/base").symlink_to(self.checkout / "runs" / RUN / "prepared/hf")
        subprocess.run(["git", "init", "-q", self.checkout], check=True, timeout=10)
        self._make_environment(self.checkout / ".venv")

    def _make_environment(self, folder: Path) -> None:
        """An environment that has the packages of this one."""
        venv.create(folder, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        here = [each for each in sys.path if each.endswith("-packages")]
        added = "".join(f"import site; site.addsitedir({each!r})\n" for each in here)
        (packages / "here.pth").write_text(added)
        program = folder / "bin/perdure"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m workers "$@"\n')
        program.chmod(0o755)

    def start(self) -> None:
        """Bring the stack up and start the run; it needs a while until it trains."""
        self.stack.up()
        self.must(f"perdure start configs/recipes/{RUN}.toml")

    def close(self) -> None:
        """End what was started."""
        with self._ends:
            for each in self._early.values():
                each.interrupt()
            self.terminal.close()

    def turn_to(self, phase: object) -> None:
        """Another terminal for another phase; what goes on in the one before ends by Ctrl-C."""
        if phase != self._phase:
            self._phase = phase
            self.terminal.close()
            self.terminal = Terminal(self.checkout, self.stack.env)

    def begin_early(self, command: str) -> None:
        """Begin a command that mostly waits; typing it later is waiting for its end."""
        self._early[command] = Going(self.filled(command), self.checkout, self.stack.env)

    def begin(self, command: str) -> Going:
        """Run one command line that goes on until Ctrl-C."""
        return self.terminal.begin(self.filled(command))

    def type(self, command: str, meanwhile: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run one command line, again for as long as it fails with words like ``meanwhile``."""
        deadline = time.monotonic() + DEADLINE_S
        done = self._once(command)
        while done.returncode and meanwhile and re.search(meanwhile, done.stderr):
            assert time.monotonic() < deadline, done.stderr
            time.sleep(POLL_S)
            done = self._once(command)
        return done

    def _once(self, command: str) -> subprocess.CompletedProcess[str]:
        """In a shell, unless it is ``perdure`` with plain words."""
        if command in self._early:
            return self._early.pop(command).finish()
        command = self.filled(command)
        if command.startswith("perdure ") and not SHELL.search(command):
            words = shlex.split(command)[1:]
            return self._program.run(words, self.checkout, self.terminal.env)
        if command.startswith("temporal ") and "TEMPORAL_ADDRESS" not in self.terminal.env:
            # The stock program asks the default port, which is the stack's unless it was taken.
            self.terminal.env["TEMPORAL_ADDRESS"] = self._info().temporal_address
        return self.terminal.type(command)

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
            time.sleep(POLL_S)

    def filled(self, command: str) -> str:
        """The command with the addresses and files of this place."""
        for word, value in (
            (r"\bURL\b", self._engine_url),
            (r"\bRECEIPT\b", self._receipt),
            (r"http://127\.0\.0\.1:1234\b", self._code_service),
            (r"temporal\.example:7233|127\.0\.0\.1:7233", self._own_temporal),
            (r"ray-head\.example:6379|10\.0\.0\.5:6379", self._ray),
        ):
            if re.search(word, command):
                command = re.sub(word, value(), command)
        return command

    def _info(self) -> StackInfo:
        status = stack_status(self.stack.folder)
        assert status is not None
        return status.info

    def _engine_url(self) -> str:
        (run,) = json.loads(self.must(f"perdure status {RUN} --json"))["runs"]
        return next(str(actor["url"]) for actor in run["actors"] if actor["role"] == "engine")

    def _receipt(self) -> str:
        first, *_ = sorted((self.checkout / "runs" / BESIDE / "evaluation").glob("update-*.json"))
        return str(first.relative_to(self.checkout))

    def _code_service(self) -> str:
        return self._ends.enter_context(code_service())

    def _own_temporal(self) -> str:
        """A server that is not the stack's, for as long as the terminal."""
        if "TEMPORAL_ADDRESS" not in self.terminal.env:
            port = free_port()
            server = f"temporal server start-dev --headless --ip 127.0.0.1 --port {port}"
            self.terminal.begin(server).until("Temporal Server:")
            return f"127.0.0.1:{port}"
        return self.terminal.env["TEMPORAL_ADDRESS"]

    def _ray(self) -> str:
        """The stack's cluster stands for one that was started by hand, with its token."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ray_token(self.stack.folder)}
        self.terminal.env |= token
        return self._info().ray_address


def changed(recipe: str, values: dict[str, str]) -> str:
    """The recipe or run file with other values of some of its keys."""
    for key, value in values.items():
        line = re.compile(rf"^{key} = .*$", re.MULTILINE)
        assert len(line.findall(recipe)) == 1, f"{key} is set not once"
        recipe = line.sub(f"{key} = {value}", recipe)
    return recipe
