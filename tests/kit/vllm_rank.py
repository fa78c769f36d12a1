"""One training run with vLLM: ``vllm_rank.py FOLDER STRATEGY RANKS SHARED`` saves what each rank ended with.

SHARED ranks share one engine.
"""

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from kit.ranks import STRATEGIES
from kit.support import fit, tiny_module, tiny_prompts
from kit.vllm_models import a_model
from lightning_rl import RLCallback, Rollout, VLLMEngine
from lightning_rl.callbacks import RolloutKL


def an_engine(**options: Any) -> VLLMEngine:
    """A small one."""
    return VLLMEngine(**dict[str, Any](kv_cache_memory_bytes=2**25, block_size=32, max_num_seqs=64) | options)


class Watch(RLCallback):
    """Keeps every rollout's log-probabilities and every row of metrics."""

    name = "watch"

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.rows: list[dict[str, float]] = []
        self.weights: dict[str, Tensor] = {}

    @override
    def observe(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        self.rows.append(pl_module.run.metrics.values())

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        weights = pl_module.parallel.full_parameters(pl_module.policy)
        self.weights = {name: weight.clone() for name, weight in weights}


def main(folder: Path, strategy: str, ranks: int, shared: int) -> None:
    """Three rollouts of two optimizer steps."""
    torch.set_num_threads(1)
    watch = Watch()
    module = tiny_module(
        policy=partial(a_model, "qwen2"),
        engine=an_engine(tensor_parallel_size=shared),
        minibatches_per_rollout=2,
        max_new_tokens=10,
        optimizer=partial(SGD, lr=0.05),
        max_grad_norm=None,
    )
    options: dict[str, Any] = {"devices": ranks, "strategy": STRATEGIES[strategy]()} if ranks > 1 else {}
    trainer = fit(module, callbacks=[watch, RolloutKL(0.1)], data=tiny_prompts(12, 4), **options)
    known: dict[str, Any] = {
        "weights": watch.weights,
        "rows": watch.rows,
        "samples": [[r.sample_ids, r.response_ids] for r in watch.rollouts],
        "world": dist.get_world_size() if dist.is_initialized() else 1,
    }
    if ranks > 1:
        total = torch.ones(1)
        dist.all_reduce(total)  # after the engine has ended
        known["sum"] = float(total)
    torch.save(known, folder / f"{ranks}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
