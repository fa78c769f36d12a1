r"""Positive NLL: imitate the responses that were right, beside the policy gradient.

.. math::
    \mathcal{L} = -\mu\, \frac{1}{\sum_{b \in \mathcal{T}} |o_b|} \sum_{b \in \mathcal{T}} \sum_t
    \log \pi_\theta(o_{b,t}), \qquad \mathcal{T} = \{b : s_b > \tau\}

the mean over all valid tokens of the right responses of a rollout, on all ranks. Where right responses are rare, it
gets more out of each of them than an advantage does. With several minibatches, each takes the sum over its own right
tokens, times the number of minibatches: every right token of the rollout weighs the same wherever it comes to lie,
whatever else its minibatch holds, and the steps of a pass are this mean on average.

Source: Yue et al. 2025 (VAPO), arXiv:2504.05118, section 4.3, the loss on positive examples.
"""

from collections.abc import Mapping
from typing import Self, cast

import torch
from jaxtyping import Bool
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_numbers
from lightning_rl.corrections import LossTerm, LossView, RLCallback, Stat
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import GlobalSum, local_sum


def token_sum(valid_tokens: Tensor, trained: Tensor, groups: Tensor, global_sum: GlobalSum = local_sum) -> Tensor:
    """Every valid token weighs 1."""
    del trained, groups, global_sum
    return valid_tokens.double()


class PositiveNLL(RLCallback):
    """Adds the negative log-likelihood of right responses to the loss.

    Logs ``positive_nll/positive``, the share of the rewarded responses that are right, and the core's
    ``positive_nll/loss``, the term without its coefficient.

    Args:
        coef: what the term is multiplied with, at least 0.
        threshold: a response is right if its task reward is greater than this.

    Raises:
        ValueError: if an option is no finite number, or the coefficient negative.
    """

    name = "positive_nll"
    provides = ("extras/positive_nll",)
    batch_statistics = True
    chooses_rows = True
    minibatches = 1

    def __init__(self, coef: float = 0.1, *, threshold: float = 0.0) -> None:
        check_numbers(at_least=0, finite=True, coef=coef)
        check_numbers(finite=True, threshold=threshold)
        self.coef = coef
        self.threshold = threshold

    @override
    def with_name(self, name: str) -> Self:
        twin = super().with_name(name)
        twin.provides = (f"extras/{name}",)
        return twin

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.minibatches = cast(RLLightningModule, pl_module).minibatches

    @override
    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        right = self._right(rollout)
        tokens = self.collectives.sum(rollout.valid_tokens[right].sum().double())
        share = torch.where(right, self.minibatches / tokens.clamp(min=1), 0.0)
        return {self.provides[0]: share.to(rollout.rewards.dtype)}

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        per_token = -view.logprobs * view.extras[self.name][:, None].to(view.logprobs.dtype)
        return LossTerm(per_token=per_token, coef=self.coef, reduction=token_sum)

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {"positive_nll/positive": Stat.of(self._right(rollout), rollout.rewarded)}

    def _right(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        return rollout.rewarded & rollout.trained & (rollout.rewards > self.threshold)
