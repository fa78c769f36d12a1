"""A pretrained model in each precision: mismatch between engine and trainer, memory, and seconds of a rollout.

    make model                          # SmolLM2-135M-Instruct, once
    python benchmarks/real_model.py
    python benchmarks/real_model.py --model FOLDER --only bf16

Each case runs in a separate process with one thread. It trains three rollouts of 16 responses on the task of
`recipes/laptop.py`. The mismatch is of every trained token; seconds are wall-clock times of the last rollout.
"""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from measure import ROOT, Report, peak_memory

sys.path.insert(0, str(ROOT / "recipes"))
sys.path.insert(0, str(ROOT / "tests"))
from kit.real_model import FOLDER, ShortFit

from lightning_rl import ModelOptions, TransformersEngine, VLLMEngine

SMALL_CACHE = {"max_model_len": 512, "kv_cache_memory_bytes": 2**28}
BOUNDS = {"float32": (5e-5, 1e-8), "bf16-mixed": (0.05, 2e-3), "bf16-true": (0.08, 5e-3), "bitwise": (0.0, 0.0)}
HEAD = ("case", "mean |d|", "max |d|", "KL", "peak memory, GiB", "sync, s", "generate, s", "update, s")


def options_of(case: str) -> dict[str, Any]:
    """Return the arguments of a case for :class:`ShortFit`."""
    cases: dict[str, Any] = {
        "float32": {},
        "bf16-mixed": {"trainer": {"precision": "bf16-mixed"}},
        "bf16-true": {"trainer": {"precision": "bf16-true"}},
        "bitwise": {"model": ModelOptions(consistency="bitwise")},
        "activation checkpointing": {"model": ModelOptions(activation_checkpointing=True)},
        "copy of the policy": {"engine": TransformersEngine(), "max_staleness": 1},
        "vLLM": {"engine": VLLMEngine(**SMALL_CACHE)},
    }
    return cases[case]


def measure(case: str, model: str) -> dict[str, float]:
    """Return the figures of a case, in this process."""
    run = ShortFit(rollouts=3, policy=model, tokenizer=model, **options_of(case))
    last = {name: values[max(values)] for name, values in run.metrics.items()}
    times = {name: last.get(f"time/{name}", 0.0) for name in ("sync", "generate", "update")}
    mean, largest = float(run.differences.mean()), float(run.differences.max())
    kl = max(run.metrics["kl/rollout"].values())
    return {"mean": mean, "max": largest, "kl": kl, "memory": peak_memory() / 2**30, **times}


def figures(case: str, model: str, python: Path) -> dict[str, float]:
    """Return the figures of a case, measured in a new process."""
    command = [python, __file__, "--model", model, "--case", case]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def main(
    *, model: str = str(FOLDER), only: str = "", case: str = "", vllm_python: Path = ROOT / ".venv-vllm/bin/python"
) -> None:
    """Measure all cases whose name contains ``only``; ``case`` measures one in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if case:
        print(json.dumps(measure(case, model)))
        return
    report, rows = Report("real_model"), list[tuple[str, ...]]()
    names = [*BOUNDS, "activation checkpointing", "copy of the policy", *(["vLLM"] if vllm_python.exists() else [])]
    for name in (name for name in names if only in name):
        found = figures(name, model, vllm_python if name == "vLLM" else Path(sys.executable))
        numbers = (f"{found[key]:.2g}" for key in ("mean", "max", "kl"))
        rows.append((name, *numbers, *(f"{found[key]:.2f}" for key in ("memory", "sync", "generate", "update"))))
        if name in BOUNDS:
            difference, kl = BOUNDS[name]
            report.bound(f"{name}: mean |d|", found["mean"], at_most=difference)
            report.bound(f"{name}: KL", found["kl"], at_most=kl)
    report.rows("Engine and trainer", HEAD, rows)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
