"""Audit on two ranks: no findings on clean runs, and a finding on one rank stops all."""

import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from faults.parts import DetachedKL
from kit.ranks import STRATEGIES, run_ranks
from kit.support import fit, tiny_module, tiny_prompts
from torch import Tensor
from typing_extensions import override

from lightning_rl import LossTerm, LossView, RLCallback
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import OPSM, AdaptiveKL, NoEOSMask, ReferenceKL, RewardNormalization
from lightning_rl.distributed import Collectives


class DetachedOnOneRank(DetachedKL):
    """A loss term that is detached on the second rank."""

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return super().loss_term(view) if torch.distributed.get_rank() else ReferenceKL.loss_term(self, view)


def sum_of_this_rank(self: Collectives, values: Tensor) -> Tensor:
    """Return the sum of this rank instead of that over all ranks."""
    return values


def audited(folder: Path, strategy: str, kind: str) -> None:
    """Run two rollouts; every rank writes the findings of its audit to a file."""
    torch.set_num_threads(1)
    corrections: list[RLCallback] = [NoEOSMask(), OPSM(1e-3), RewardNormalization("group", "none")]
    if kind == "adaptive":
        corrections = [AdaptiveKL(0.1, target=0.01, horizon=20), RewardNormalization(clip=1.0)]
    corrections += [DetachedOnOneRank(0.1, as_loss=True)] if kind == "on one rank" else []
    module = tiny_module(
        minibatches_per_rollout=2,
        epochs_per_rollout=2,
        max_tokens_per_microbatch=20,
        temperature=0.7,
        advantages="reinforce_plus_plus" if kind == "adaptive" else "grpo",
    )
    said, sums = "", sum_of_this_rank if kind == "own denominators" else Collectives.sum
    with warnings.catch_warnings(), patch.object(Collectives, "sum", sums):
        warnings.simplefilter("ignore")
        try:
            fit(
                module,
                callbacks=[*corrections, SignalAudit(1, "raise")],
                data=tiny_prompts(8, 4),
                default_root_dir=folder,
                strategy=STRATEGIES[strategy](),
                devices=2,
            )
        except RuntimeError as raised:
            said = str(raised)
    (folder / f"rank-{module.global_rank}.txt").write_text(said)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "kind", "named"),
    [
        ("ddp", "clean", ""),
        ("ddp", "on one rank", "gradient_liveness: callback reference_kl.loss_term"),
        ("ddp", "own denominators", "rank_denominators: reduction token_mean"),
        ("ddp", "adaptive", ""),
        pytest.param("fsdp1", "clean", "", marks=pytest.mark.nightly),
        ("fsdp2", "clean", ""),
        pytest.param("fsdp2", "on one rank", "gradient_liveness", marks=pytest.mark.nightly),
        pytest.param("zero3", "clean", "", marks=pytest.mark.nightly),
    ],
)
def test_ranks_are_audited_alike(tmp_path: Path, strategy: str, kind: str, named: str) -> None:
    run_ranks(__file__, 2, tmp_path, strategy, kind)
    said = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert all(named in own if named else not own for own in said), said
    saved = {path.name for path in (tmp_path / "audit").glob("*.json")}
    assert saved == ({"rollout-000000-rank1.json"} if kind == "on one rank" else saved if named else set())


if __name__ == "__main__":
    audited(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
