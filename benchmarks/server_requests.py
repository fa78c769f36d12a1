"""CPU seconds of the client for 1,000 requests to servers that answer at once.

    python benchmarks/server_requests.py

Four servers of a script (tests/kit/scripted_server.py) run in another process, so nothing of theirs is counted; what is
counted is all that ``VLLMServerEngine.generate`` does, threads included: places, HTTP, JSON, checks, completions.
"""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from jsonargparse import auto_cli
from measure import ROOT, Report, Seconds

from lightning_rl import VLLMServerEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # whose are servers of a script
from kit.engine_requests import request_of
from kit.scripted_server import KEY
from kit.support import tiny_model

SERVE = """
import sys
from kit.scripted_server import ScriptedServer
servers = [ScriptedServer() for _ in range(int(sys.argv[1]))]
print(*(server.url for server in servers), flush=True)
sys.stdin.read()
for server in servers:
    server.kill()
"""


def main(number: int = 1000, servers: int = 4, group_size: int = 8, tokens: int = 32, rounds: int = 7) -> None:
    """Print the seconds of each round after the first.

    Args:
        number: of requests, all sent together.
        servers: that answer them.
        group_size: samples of one prompt.
        tokens: of each response.
        rounds: that are measured.
    """
    command = [sys.executable, "-c", SERVE, str(servers)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT / "tests", text=True
    ) as process:
        urls = process.stdout.readline().split() if process.stdout else []
        seconds = measure(urls, number, group_size, tokens, rounds)
    report = Report("server_requests", {"requests": number, "servers": servers, "tokens each": tokens})
    report.table("requests", {"VLLMServerEngine": seconds}, base="VLLMServerEngine")
    report.bound("CPU seconds of the client for 1,000 requests", median(seconds.cpu) * 1000 / number, at_most=0.5)
    report.finish()


def measure(urls: list[str], number: int, group_size: int, tokens: int, rounds: int) -> Seconds:
    """Of each round of requests."""
    engine = VLLMServerEngine(urls, api_key=KEY, canary=False, at_once=64)
    seconds = Seconds([], [])
    model = tiny_model("llama", dtype=torch.float32)  # as the servers say that they hold
    engine.start(model, None, device=model.device, dtype=model.dtype)
    engine.expect(model.named_parameters())
    engine.load_weights(model.named_parameters(), 0)
    requests = [request_of((n // group_size % 16, 3), n, n, max_new_tokens=tokens) for n in range(number)]
    for turn in range(rounds + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        drawn = engine.generate(requests, logprobs=True)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if sum(len(completion.token_ids) for completion in drawn) != number * tokens:
            raise RuntimeError(f"expected {number} responses of {tokens} tokens")
        if turn:
            seconds.add(wall, cpu)
    engine.close()
    return seconds


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
