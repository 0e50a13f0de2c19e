"""A package called ``sglang`` that starts in no time, and serves what the supervisor asks for.

Its server is a real child process with a real HTTP port and, as the real one has, processes of its
own titled ``sglang::...``. ``FAKE_SGLANG`` says how it behaves.
"""

import os
import sys
from pathlib import Path

SERVER_ARGS = """
import argparse, dataclasses
from typing import Annotated as A, List, Optional


class Arg:
    def __init__(self, **told):
        pass


@dataclasses.dataclass
class ServerArgs:
    model_path: A[str, Arg(help="weights", aliases=["--model"])]
    host: A[str, "host"] = "127.0.0.1"
    port: A[int, "port"] = 30000
    mem_fraction_static: A[Optional[float], Arg(help="share", resolvable=True)] = None
    tp_size: A[int, Arg(help="ranks", aliases=["--tensor-parallel-size"])] = 1
    cuda_graph_bs_decode: A[Optional[List[int]], "sizes"] = None
    disable_radix_cache: A[bool, "no cache"] = False
    removed_config: A[Optional[str], Arg(help="python only", no_cli=True)] = None
    stat_loggers: Optional[dict] = None

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--reasoning-parser", type=str, help="not --an-option")


def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--mem-fraction-static", type=float)
    args = parser.parse_args(argv)
    if args.mem_fraction_static and args.mem_fraction_static > 1:
        raise ValueError("mem_fraction_static must be at most 1")
    return args
"""

LAUNCH_SERVER = """
import http.server, os, signal, subprocess, sys, threading, time

PART = "import time; time.sleep(120)"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/slow":
            print("request arrived", flush=True)
            time.sleep(60)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        print("posted", self.path, body.decode(), flush=True)
        if os.environ.get("FAKE_SGLANG") == "refuses":
            self.send_error(404)
        else:
            self.do_GET()

    def log_message(self, *args):
        pass


def launch_server(args, run_scheduler_process_func):
    mode = os.environ.get("FAKE_SGLANG", "serves")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that drains without a limit
    for title in ("sglang::scheduler", "sglang::detokenizer"):
        part = subprocess.Popen([title, "-c", PART], executable=sys.executable)
        print(title, part.pid, flush=True)
    print("server", os.getpid(), "told", os.environ.get("TOLD"), flush=True)
    if mode == "dies":
        print("no room for the model", flush=True)
        os._exit(7)
    if mode == "never":
        time.sleep(120)
    http.server.ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
"""

FILES = {
    "sglang/__init__.py": "",
    "sglang/launch_server.py": "",
    "sglang/srt/entrypoints/__init__.py": "",
    "sglang/srt/entrypoints/http_server.py": LAUNCH_SERVER,
    "sglang/srt/__init__.py": "",
    "sglang/srt/managers/__init__.py": "",
    "sglang/srt/managers/tokenizer_manager.py": (
        "class TokenizerManager:\n    async def pause_generation(self, order): pass\n"
    ),
    "sglang/srt/plugins.py": "def load_plugins(): pass\n",
    "sglang/srt/server_args.py": SERVER_ARGS,
    "sglang/srt/utils.py": "def kill_process_tree(pid, include_parent): pass\n",
    "transformers.py": (
        "class AutoConfig:\n"
        "    @staticmethod\n"
        "    def from_pretrained(folder):\n"
        "        open(folder + '/config.json').close()\n"
        "AutoTokenizer = AutoConfig\n"
    ),
}


def write_fake_sglang(site: Path) -> dict[str, str]:
    """Write the package into ``site``; returns the environment in which it is found."""
    for name, text in FILES.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "PERDURE_SGLANG_PYTHON": sys.executable}
