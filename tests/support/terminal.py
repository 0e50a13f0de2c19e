"""A terminal: what is exported in it, and what goes on in it until Ctrl-C."""

import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

DEADLINE_S = 150.0
POLL_S = 0.05


class Going:
    """A command that was begun and goes on, in a process group of its own."""

    def __init__(self, command: str, folder: Path, env: dict[str, str]) -> None:
        self.command = command
        written, name = tempfile.mkstemp(suffix=".log", dir=folder.parent)
        self._said = Path(name)
        self.process = subprocess.Popen(
            # Who runs tests in the background has them ignore Ctrl-C; a terminal does not.
            ["env", "--default-signal=INT", "bash", "-c", command],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(written)

    def said(self) -> str:
        """What it has printed so far."""
        return self._said.read_text()

    def until(self, words: str) -> re.Match[str]:
        """Wait until it prints what the pattern matches."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(words, self.said())):
            assert self.process.poll() is None, f"{self.command} ended\n{self.said()}"
            assert time.monotonic() < deadline, f"{self.command} did not serve\n{self.said()}"
            time.sleep(POLL_S)
        return found

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end."""
        code = self.process.wait(DEADLINE_S)
        return subprocess.CompletedProcess(self.command, code, self.said(), "")

    def interrupt(self) -> subprocess.CompletedProcess[str]:
        """Ctrl-C, and wait for its end; what does not end is killed."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            return self.finish()
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.finish()


class Terminal:
    """A shell in ``folder``."""

    def __init__(self, folder: Path, env: dict[str, str], deadline_s: float = DEADLINE_S) -> None:
        self.folder = folder
        self.env = dict(env)
        self._deadline_s = deadline_s
        self._going: list[Going] = []

    def type(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run one command line to its end; what it exports stays."""
        done = subprocess.run(
            ["bash", "-c", f"{command} && env -0" if command.startswith("export ") else command],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self._deadline_s,
            check=False,
        )
        if command.startswith("export "):
            self.env |= dict(each.split("=", 1) for each in done.stdout.split("\0") if each)
        return done

    def begin(self, command: str) -> Going:
        """Run one command line that goes on."""
        self._going.append(Going(command, self.folder, self.env))
        return self._going[-1]

    def close(self) -> None:
        """End by Ctrl-C what goes on, the last one first; each has to end well."""
        ends = [self._going.pop().interrupt() for _ in range(len(self._going))]
        assert not [each for each in ends if each.returncode], ends
