"""Rewards on a Ray cluster against one process and the local pool: speed of slow rewards, overhead of fast ones.

    python benchmarks/ray_workers.py

The cluster has three nodes of two CPUs each, all on this machine. A slow reward sleeps 50 ms for a sample, so that six
workers need no six cores. Each figure is the median of five rounds, after one that starts the workers.
"""

import os
import tempfile
import time
from statistics import median
from typing import Any

from jsonargparse import auto_cli
from measure import MIN_ROUNDS, Report
from ray.cluster_utils import Cluster

from lightning_rl import RayWorkers
from lightning_rl.rewards import SubprocessReward

NODES, CPUS = 3, 2


def sleep(completions: Any, **_: Any) -> list[float]:
    """Return the length of each completion after 50 ms."""
    time.sleep(0.05)
    return [float(len(text)) for text in completions]


def length(completions: Any, **_: Any) -> list[float]:
    """Return the length of each completion."""
    return [float(len(text)) for text in completions]


def seconds(reward: SubprocessReward, texts: list[str]) -> float:
    """Return the seconds of a call."""
    taken = []
    for _ in range(MIN_ROUNDS + 1):
        begin = time.perf_counter()
        if reward(texts, texts) != [float(len(text)) for text in texts]:
            raise RuntimeError("expected the lengths of the texts in their order")
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def main(*, samples: int = 240, quick: bool = False) -> None:
    """Measure ``samples`` completions of each kind."""
    samples = 48 if quick else samples
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(dir="/tmp")
    cluster = Cluster()
    for _ in range(NODES):
        cluster.add_node(num_cpus=CPUS, include_dashboard=False)
    os.environ["RAY_ADDRESS"] = cluster.address
    texts = [str(10**place) for place in range(samples)]
    places = {"one process": 1, "local pool": NODES * CPUS, "Ray": RayWorkers(NODES * CPUS)}
    found = {}
    for function in (sleep, length):
        for name, processes in places.items():
            reward = SubprocessReward(function, processes=processes, per_sample=True)
            found[function.__name__, name] = seconds(reward, texts)
            reward.close()
    report = Report("ray_workers", {"nodes": NODES, "CPUs of a node": CPUS})
    rows = [(*key, f"{1e3 * taken / samples:.2f}") for key, taken in found.items()]
    report.rows("Seconds of a call", ("reward", "processes", "ms per sample"), rows)
    report.floor("speed-up of 50 ms", found["sleep", "one process"] / found["sleep", "Ray"], at_least=5.0)
    overhead = 1e3 * (found["length", "Ray"] - found["length", "local pool"]) / samples
    report.bound("ms per sample above the local pool", overhead, at_most=1.0)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
