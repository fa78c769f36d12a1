r"""Positive NLL: add the negative log-likelihood of correct responses to the loss.

.. math::
    \mathcal{L} = -\mu\, \frac{1}{\sum_{b \in \mathcal{T}} |o_b|} \sum_{b \in \mathcal{T}} \sum_t
    \log \pi_\theta(o_{b,t}), \qquad \mathcal{T} = \{b : s_b > \tau\}

the mean over all valid tokens of the correct responses of a rollout, on all ranks. With several minibatches, each step
uses the sum over its own correct tokens times the number of minibatches. So every correct token of the rollout has the
same weight, and the steps of an epoch average to this mean.

Source: Yue et al. 2025 (VAPO), arXiv:2504.05118, section 4.3, the loss on positive examples.
"""

from collections.abc import Mapping
from typing import Self, cast

import torch
from jaxtyping import Bool
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossTerm, LossView, RLCallback, Stat
from lightning_rl.module import RLLightningModule
from lightning_rl.rewards.correctness import check_correct_by, deciding_scores
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.utils.arguments import check_numbers, check_text


def token_sum(valid_tokens: Tensor, trained: Tensor, groups: Tensor, global_sum: GlobalSum = local_sum) -> Tensor:
    """Return weight 1 for every valid token."""
    del trained, groups, global_sum
    return valid_tokens.double()


class PositiveNLL(RLCallback):
    """Negative log-likelihood of correct responses as a term of the loss.

    Logs the fraction of rewarded responses that are correct as ``positive_nll/positive`` and the term without its
    coefficient as ``positive_nll/loss``.

    Args:
        coef: Coefficient of the term, at least 0.
        threshold: Score above which a response is correct, by the function ``correct_by``.
        correct_by: Name of the reward function that decides if a response is correct; None for the first that applies
            to the response. Several without a name print a line.

    Raises:
        ValueError: If an option is not a finite number or the coefficient is negative; at setup, if there is no such
            reward function.
    """

    name = "positive_nll"
    token_wise = True
    provides = ("extras/positive_nll",)
    batch_statistics = True
    chooses_rows = True
    minibatches_per_rollout = 1

    def __init__(self, coef: float = 0.1, *, threshold: float = 0.0, correct_by: str | None = None) -> None:
        check_numbers(at_least=0, finite=True, coef=coef)
        check_numbers(finite=True, threshold=threshold)
        self.coef = coef
        check_text(optional=True, correct_by=correct_by)
        self.threshold = threshold
        self.correct_by = correct_by

    @override
    def with_name(self, name: str) -> Self:
        twin = super().with_name(name)
        twin.provides = (f"extras/{name}",)
        return twin

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        module = cast(RLLightningModule, pl_module)
        self.minibatches_per_rollout = module.options.minibatches_per_rollout
        if stage == "fit":
            check_correct_by(module.options.rewards, self.correct_by, type(self).__name__)

    @override
    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        correct = self._correct(rollout)
        tokens = self.collectives.sum(rollout.valid_tokens[correct].sum().double())
        weight = torch.where(correct, self.minibatches_per_rollout / tokens.clamp(min=1), 0.0)
        return {self.provides[0]: weight.to(rollout.rewards.dtype)}

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        per_token = -view.logprobs * view.extras[self.name][:, None].to(view.logprobs.dtype)
        return LossTerm(per_token=per_token, coef=self.coef, reduction=token_sum)

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {"positive_nll/positive": Stat.of(self._correct(rollout), rollout.rewarded)}

    def _correct(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        return rollout.rewarded & rollout.trained & (deciding_scores(rollout, self.correct_by) > self.threshold)
