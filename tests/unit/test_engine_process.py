import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from models.errors import ConfigurationError, EngineLost
from workers.engines.process import ServerCommand, ServerProcess, read_tail

READY = """
import json, os, sys
path = sys.argv[1]
text = json.dumps({"port": 1, "pid": os.getpid(), "url": "http://127.0.0.1:1"})
with open(path + ".part", "w") as file:
    file.write(text)
os.rename(path + ".part", path)
"""


def command(folder: Path, code: str) -> ServerCommand:
    script = folder / "server.py"
    script.write_text(textwrap.dedent(code))
    ready = folder / "ready.json"
    return ServerCommand(
        name="engine-7",
        argv=(sys.executable, "-u", str(script), str(ready)),
        env=os.environ | {"MARK": "from the caller"},
        log_path=folder / "logs" / "engine-7.log",
        ready_file=ready,
    )


def serving(then: str = "import time\ntime.sleep(60)") -> str:
    return READY + "\n" + textwrap.dedent(then)


async def start(folder: Path, code: str, timeout_s: float = 10.0) -> ServerProcess:
    return await ServerProcess.start(command(folder, code), timeout_s)


async def gone(pid: int) -> None:
    async with asyncio.timeout(5):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


async def test_a_server_starts_serves_and_stops(tmp_path: Path):
    server = await start(tmp_path, 'import os\nprint("mark", os.environ["MARK"])\n' + serving())

    assert server.url == "http://127.0.0.1:1"
    assert server.alive
    assert server.log_tail() == "mark from the caller"
    exit_ = await server.stop(grace_s=5)
    assert exit_.returncode == -signal.SIGTERM
    assert not server.alive
    assert not psutil.pid_exists(server.pid)


async def test_a_server_that_ends_early_is_reported_with_its_last_lines(tmp_path: Path):
    code = "import sys\nfor i in range(30):\n    print('line', i)\nsys.exit(3)"

    with pytest.raises(EngineLost) as caught:
        await start(tmp_path, code)

    message = str(caught.value)
    assert "engine-7 ended with exit status 3" in message
    assert message.endswith("line 28\nline 29")
    assert "line 9\n" not in message


async def test_a_server_that_refuses_its_options_is_a_configuration_error(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"engine-7 refuses to start(.|\n)*no such model"):
        await start(tmp_path, "import sys\nprint('no such model')\nsys.exit(2)")


async def test_a_server_that_is_never_ready_is_killed_at_the_deadline(tmp_path: Path):
    code = "import os, time\nprint(os.getpid())\ntime.sleep(60)"

    with pytest.raises(EngineLost, match=r"did not serve within 1\.5 s") as caught:
        await start(tmp_path, code, timeout_s=1.5)

    assert not psutil.pid_exists(int(str(caught.value).splitlines()[-1]))


async def test_log_of_an_earlier_life_is_kept_but_not_quoted(tmp_path: Path):
    first = await start(tmp_path, "print('first life')\n" + serving())
    await first.stop(grace_s=5)
    second = await start(tmp_path, "print('second life')\n" + serving())

    assert second.log_tail() == "second life"
    assert read_tail(tmp_path / "logs" / "engine-7.log") == "first life\nsecond life"
    await second.stop(grace_s=5)


async def test_death_is_seen_at_once_by_every_waiter(tmp_path: Path):
    server = await start(tmp_path, "print('working')\n" + serving())
    waiters = [asyncio.ensure_future(server.wait_exit()) for _ in range(2)]
    await asyncio.sleep(0)

    os.kill(server.pid, signal.SIGKILL)

    async with asyncio.timeout(2):
        exits = await asyncio.gather(*waiters)
    assert [each.returncode for each in exits] == [-signal.SIGKILL] * 2
    assert exits[0].log_tail == "working"
    assert not server.alive


async def test_a_server_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path):
    then = """
    import signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid)
    signal.pause()
    time.sleep(60)
    """
    server = await start(tmp_path, serving(then))
    async with asyncio.timeout(5):
        while not server.log_tail():
            await asyncio.sleep(0.01)
    child = int(server.log_tail())

    exit_ = await server.stop(grace_s=0.2)

    assert exit_.returncode == -signal.SIGKILL
    await gone(child)


async def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path):
    command(tmp_path, serving())
    parent_code = f"""
    import asyncio, os, sys
    from pathlib import Path
    from workers.engines.process import ServerCommand, ServerProcess
    folder = Path({str(tmp_path)!r})
    ready = folder / "ready.json"
    argv = (sys.executable, str(folder / "server.py"), str(ready))
    command = ServerCommand("engine-7", argv, dict(os.environ), folder / "log", ready)
    async def main():
        server = await ServerProcess.start(command, 20)
        print(server.pid, flush=True)
        await asyncio.sleep(60)
    asyncio.run(main())
    """
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(parent_code), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    server = int(await parent.stdout.readline())
    assert psutil.pid_exists(server)
    parent.kill()
    await parent.wait()
    await gone(server)
