"""Faults on two ranks: sums, prompts, coefficients and metrics of one rank."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

import lightning_rl.rollouts.collector
from faults.fault import Fault, correction, user
from faults.patches import after
from lightning_rl import LossTerm, LossView, RLCallback, Rollout, Stat
from lightning_rl.data import Prompt
from lightning_rl.distributed import Collectives


def sum_of_this_rank(self: Collectives, values: Tensor) -> Tensor:
    return values


def same_hand(hands: Sequence[list[Prompt]], *_: Any) -> list[list[Prompt]]:
    return [list(hands[0]) for _ in hands]


def best_of_rank(rollout: Rollout) -> Mapping[str, Stat]:
    lengths = rollout.response_lengths.double() * rollout.rewards
    return {"best_of_rank/reward": Stat.single(lengths.max())}


class OwnCoefficient(RLCallback):
    """Adapts a coefficient to the rewards of this rank."""

    name = "own_coefficient"

    def __init__(self) -> None:
        self.coef = 0.1

    @override
    def observe(self, rollout: Rollout) -> None:
        self.coef = 0.1 + float(rollout.rewards.mean())

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return LossTerm(per_token=(view.logprobs + 1).square(), coef=self.coef)


SLOW: dict[str, Any] = {"optimizer": partial(AdamW, lr=0.01), "minibatches_per_rollout": 2}

FAULTS: tuple[Fault, ...] = (
    Fault(
        "denominators of one rank of two",
        "reduction|rank",
        options=SLOW,
        patches=[patch.object(Collectives, "sum", sum_of_this_rank)],
        ranks=2,
    ),
    Fault(
        "the same prompts on both ranks",
        "prompt|distribute|generate|data|sampl",
        options=SLOW,
        patches=[after(lightning_rl.rollouts.collector, "distribute_prompts", same_hand)],
        ranks=2,
    ),
    user(
        "a user's figure that is the mean of two ranks' best",
        correction(rollout_metrics=best_of_rank),
        options=SLOW,
        ranks=2,
    ),
    user("a coefficient that each of two ranks adapts by itself", OwnCoefficient, options=SLOW, ranks=2),
)
