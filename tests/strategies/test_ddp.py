"""Two ranks under DDP make the same optimizer steps as one device."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.rows import SIGNS, Rows
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts, weights_of
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightning_rl.callbacks import (
    OPSM,
    AdaptiveKL,
    EntropyBonus,
    LinearLengthPenalty,
    NoEOSMask,
    PositiveNLL,
    ReferenceKL,
    RewardNormalization,
    RolloutKL,
    ScoreCentering,
    StopProperly,
    TruncatedIS,
)
from lightning_rl.generation import Completion, Request, TransformersEngine

CORRECTIONS: dict[str, Any] = {
    "fixed": lambda: [NoEOSMask(), OPSM(1e-3), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True)],
    "adaptive": lambda: [
        RewardNormalization(clip=1.0),
        AdaptiveKL(0.1, target=0.01, horizon=20),
        EntropyBonus(0.02, target=2.2, step=0.01),
    ],
    "tokens of the batch": lambda: [TruncatedIS(cap=1.1, normalized=True), PositiveNLL(0.1), LinearLengthPenalty()],
    "rows of the batch": lambda: [TruncatedIS("sequence", cap=1.2, normalized=True), PositiveNLL(0.1), StopProperly()],
    "centered": lambda: [NoEOSMask(), ScoreCentering(4)],
}
ADVANTAGES = {
    "fixed": "grpo",
    "adaptive": "reinforce_plus_plus",
    "tokens of the batch": "gpg",
    "rows of the batch": "gpg",
    "centered": "grpo",
}


class Mismatched(TransformersEngine):
    """Says of every token another log-probability than the trainer does, the same on any rank."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        completions = super().generate_batch(requests, logprobs=logprobs)
        return [replace(one, logprobs=_moved(one)) if one.logprobs is not None else one for one in completions]


def _moved(completion: Completion) -> Tensor:
    assert completion.logprobs is not None
    return completion.logprobs - 0.3 * torch.tensor(completion.token_ids).sin().abs()


def run(folder: Path, kind: str, **trainer: Any) -> None:
    """A float64 run of two rollouts with K = 4, whose weights, figures and states rank 0 saves."""
    torch.set_num_threads(1)
    rows = Rows()
    module = tiny_module(
        policy=partial(tiny_policy, dtype=torch.float64), optimizer=partial(SGD, lr=0.05),
        minibatches_per_rollout=2, epochs_per_rollout=2, max_tokens_per_microbatch=20, advantages=ADVANTAGES[kind],
        engine=Mismatched() if "batch" in kind else None,
    )  # fmt: skip
    fit(module, callbacks=[*CORRECTIONS[kind](), rows], data=tiny_prompts(8, 4), **trainer)
    if module.global_rank == 0:
        states = {callback.name: callback.state_dict() for callback in module.run.corrections.callbacks}
        torch.save((weights_of(module), rows.rows, states), folder / kind)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of every kind on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, 2, folder)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_two_ranks_equal_one_device(tmp_path: Path, kind: str, two_ranks: Path) -> None:
    run(tmp_path, kind)
    weights, rows, states = torch.load(tmp_path / kind)
    others, other_rows, other_states = torch.load(two_ranks / kind)
    assert max(float((others[name] - weight).abs().max()) for name, weight in weights.items()) < 1e-12
    assert len(rows) == len(other_rows) == 8
    for row, other in zip(rows, other_rows, strict=True):
        assert row.keys() == other.keys()
        assert other == pytest.approx({**row, **{key: other[key] for key in SIGNS & row.keys()}}, rel=1e-6, abs=1e-9)
    assert states.keys() == other_states.keys()
    assert all(other_states[name] == pytest.approx(state, rel=1e-9) for name, state in states.items())


if __name__ == "__main__":
    for each in CORRECTIONS:
        run(Path(sys.argv[1]), each, devices=2, strategy=STRATEGIES["ddp"]())
