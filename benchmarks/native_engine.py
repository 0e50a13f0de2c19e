"""Output tokens per second of the native engine, over HTTP, against transformers' ``generate``.

    python benchmarks/native_engine.py MODEL_FOLDER [--dtype bfloat16] [--threads 2] [--rounds 3]

Both sides sample 8 prompts x 8 responses of a fixed length at temperature 1 from the same weights
in the same dtype with the same number of threads. Rounds alternate, so that both meet the same
load of the machine; the medians are compared. The engine also returns log-probs, the peer does not.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import httpx
import psutil
import torch
import transformers

NUM_PROMPTS, NUM_SIBLINGS, PROMPT_LENGTH = 8, 8, 56
START_DEADLINE_S = 120.0
CALL_DEADLINE_S = 600.0


def main() -> None:
    """Run both sides and print one row per response length, then one JSON line."""
    told = parse_arguments()
    torch.set_num_threads(told.threads)
    dtype = getattr(torch, told.dtype)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        told.model, dtype=dtype, use_safetensors=True
    ).eval()
    prompts = torch.randint(
        10,
        peer.config.vocab_size,
        (NUM_PROMPTS, PROMPT_LENGTH),
        generator=torch.Generator().manual_seed(0),
    )
    rows = []
    with running_engine(told) as (url, pid, ready_s):
        print(f"engine ready {ready_s:.2f} s after its start")
        for length in told.new_tokens:
            rows.append(compare(url, pid, peer, prompts, length, told.rounds))
            print(describe(rows[-1]))
    print(json.dumps({"ready_s": round(ready_s, 2), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[16, 64])
    return parser.parse_args()


@contextmanager
def running_engine(told: argparse.Namespace) -> Iterator[tuple[str, int, float]]:
    """Address, process id and seconds to readiness of a fresh engine."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "workers.engines.native", "--model-path", str(told.model)]
        command += ["--dtype", told.dtype, "--num-threads", str(told.threads)]
        command += ["--ready-file", str(ready), "--exit-with-parent"]
        started = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if process.poll() is not None or time.perf_counter() - started > START_DEADLINE_S:
                    raise SystemExit("the engine did not start")
                time.sleep(0.01)
            seconds = time.perf_counter() - started
            yield json.loads(ready.read_text())["url"], process.pid, seconds
        finally:
            process.terminate()
            process.wait(START_DEADLINE_S)


def compare(
    url: str, pid: int, peer: Any, prompts: torch.Tensor, length: int, rounds: int
) -> dict[str, float]:
    """Median tokens/s of both sides, wall and CPU, after one unmeasured round each."""
    engine = psutil.Process(pid)
    own = psutil.Process()
    num_tokens = NUM_PROMPTS * NUM_SIBLINGS * length
    walls: dict[str, list[float]] = {"engine": [], "peer": []}
    cpus: dict[str, list[float]] = {"engine": [], "peer": []}
    for number in range(rounds + 1):
        for side, process in (("engine", engine), ("peer", own)):
            wall, cpu = time.perf_counter(), cpu_seconds(process)
            if side == "engine":
                got = asyncio.run(ask_engine(url, prompts.tolist(), length, number))
            else:
                got = ask_peer(peer, prompts, length, number)
            wall, cpu = time.perf_counter() - wall, cpu_seconds(process) - cpu
            if got != num_tokens:
                raise SystemExit(f"{side} made {got} tokens instead of {num_tokens}")
            if number:
                walls[side].append(wall)
                cpus[side].append(cpu)
    result = {"new_tokens": float(length)}
    for side in walls:
        result[f"{side}_tokens_per_s"] = num_tokens / statistics.median(walls[side])
        result[f"{side}_tokens_per_cpu_s"] = num_tokens / statistics.median(cpus[side])
    result["ratio"] = result["engine_tokens_per_s"] / result["peer_tokens_per_s"]
    result["cpu_ratio"] = result["engine_tokens_per_cpu_s"] / result["peer_tokens_per_cpu_s"]
    return {name: round(value, 2) for name, value in result.items()}


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def ask_engine(url: str, prompts: list[list[int]], length: int, seed: int) -> int:
    """All samples as separate concurrent calls, as the producer makes them; number of tokens."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=CALL_DEADLINE_S, limits=limits) as client:
        calls = [
            client.post(
                "/generate",
                json={
                    "input_ids": prompt,
                    "return_logprob": True,
                    "sampling_params": {
                        "max_new_tokens": length,
                        "temperature": 1.0,
                        "ignore_eos": True,
                        "sampling_seed": seed * 1000 + sibling,
                    },
                },
            )
            for prompt in prompts
            for sibling in range(NUM_SIBLINGS)
        ]
        answers = await asyncio.gather(*calls)
    return sum(len(answer.raise_for_status().json()["output_ids"]) for answer in answers)


def ask_peer(peer: Any, prompts: torch.Tensor, length: int, seed: int) -> int:
    """The same batch by ``generate``; number of tokens."""
    torch.manual_seed(seed)
    batch = prompts.repeat_interleave(NUM_SIBLINGS, 0)
    with torch.inference_mode():
        output = peer.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
        )
    return int(output[:, batch.shape[1] :].numel())


def describe(row: dict[str, float]) -> str:
    return (
        f"{row['new_tokens']:.0f} new tokens: engine {row['engine_tokens_per_s']:.0f} tokens/s,"
        f" transformers {row['peer_tokens_per_s']:.0f} tokens/s, ratio {row['ratio']:.2f};"
        f" per CPU second {row['engine_tokens_per_cpu_s']:.0f} and"
        f" {row['peer_tokens_per_cpu_s']:.0f}, ratio {row['cpu_ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
