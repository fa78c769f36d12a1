"""Effect of compile=True: seconds of an update with and without it, and the number of updates to break even.

    python benchmarks/compile.py
    python benchmarks/compile.py --size 10M --threads 2

The update of benchmarks/update.py as it is and with the parts of the policy's layers compiled by inductor. The
break-even point is the compilation time of the first update, from an empty cache, divided by the savings per update.
"""

import os
import tempfile
import warnings
from functools import partial
from statistics import median

import torch
from jsonargparse import auto_cli
from measure import Report, take_turns
from torch._dynamo.utils import counters
from torch.optim import AdamW
from transformers import Qwen2ForCausalLM
from update import KINDS, ROWS, random_rollout, stage_update
from workload import SIZES, qwen2

from lightning_rl.policy import PolicyModel, make_plan
from lightning_rl.policy.compilation import compile_layers

PLAIN, COMPILED = "as it is", "compiled"


def main(*, size: str = "1M", rounds: int = 7, threads: int = 1, quick: bool = False) -> None:
    """Compare the two at each distribution of lengths.

    Args:
        size: of the model, by its name in workload.py.
        rounds: of each that are measured.
        threads: of torch.
        quick: an eighth of the rows.
    """
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    report = Report("compile", {"size": size})
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="lightning-rl-compile-")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose CPU seconds are counted
    policies = {name: policy_of(size) for name in (PLAIN, COMPILED)}
    compile_layers(policies[COMPILED], policies[COMPILED].layers(), "inductor")
    optimizers = {
        name: AdamW(policy.parameters(), lr=1e-5, weight_decay=0.0, fused=True) for name, policy in policies.items()
    }
    first, graphs, cost = dict[str, float](), 0, 0.0
    for kind in KINDS:
        rollout = random_rollout(kind, ROWS // 8 if quick else ROWS)
        microbatches = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=2560).step(0)
        variants = {
            name: partial(stage_update, policy, optimizers[name], rollout, microbatches, [])
            for name, policy in policies.items()
        }
        for name, run in variants.items():
            begin = cpu_seconds()
            run()
            first[name] = cpu_seconds() - begin
        graphs = counters["stats"]["unique_graphs"]
        seconds = take_turns(variants, rounds, tokens=int(rollout.valid_tokens.sum()))
        report.table(f"{kind} lengths, {len(microbatches)} microbatches", seconds, base=PLAIN)
        saved = median(a - b for a, b in zip(seconds[PLAIN].cpu, seconds[COMPILED].cpu, strict=True))
        cost += first[COMPILED] - first[PLAIN]
        pays = f"from update {cost / saved:.0f} on" if saved > 0 else "never"
        report.rows(
            f"{kind} lengths: when it pays",
            ("CPU seconds: first updates so far, more", "a later one, less", "graphs by now", "pays"),
            [(f"{cost:.1f}", f"{saved:.4f}", graphs, pays)],
        )
        ratio = median(seconds[COMPILED].of_all(seconds[PLAIN]).cpu)
        report.bound(f"{kind}: compiled, of as it is", ratio, at_most=1.05)
        recompiled = counters["stats"]["unique_graphs"] - graphs
        report.bound(f"{kind}: graphs compiled after the first update", recompiled, at_most=0)
    report.finish()


def cpu_seconds() -> float:
    """Of this process and of the compilers that it has waited for."""
    return sum(os.times()[:4])


def policy_of(size: str) -> PolicyModel:
    """Return a policy with random weights, the same each time."""
    torch.manual_seed(0)
    return PolicyModel(Qwen2ForCausalLM(qwen2(SIZES[size])), None, temperature=1.0, packed=True)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
