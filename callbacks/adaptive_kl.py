r"""Adaptive KL: a reference KL whose coefficient is adapted to hold a target KL.

.. math::
    \beta \leftarrow \beta \Bigl(1 + \operatorname{clip}\Bigl(\frac{\overline{KL}}{\text{target}} - 1,\ \pm 0.2\Bigr)
    \frac{n}{\text{horizon}}\Bigr)

after every rollout of n responses; with more responses than the horizon, once per horizon, so :math:`\beta` stays above
0. :math:`\overline{KL}` averages the estimate over the tokens of each response, then over the responses of all ranks.
The new coefficient applies from the next reward or loss on; checkpoints store it.

Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
"""

import math
from typing import Any

import torch
from typing_extensions import override

from lightning_rl.callbacks.reference_kl import ReferenceKL
from lightning_rl.corrections import LossView, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.signal.kl import KLEstimator
from lightning_rl.signal.masked import row_mean
from lightning_rl.utils.arguments import check_counts, check_numbers

RANGE = torch.finfo(torch.float32)  # of the coefficient, which multiplies values in float32
MAX_HORIZONS = 1000  # of one step; more than enough to cross that range


class AdaptiveKL(ReferenceKL):
    """Reference KL with an adaptive coefficient; replaces ReferenceKL.

    Logs ``adaptive_kl/estimate`` and ``adaptive_kl/positive``, which are those of ReferenceKL, and the coefficient that
    the rewards or the losses of the rollout have as ``adaptive_kl/beta``.

    Args:
        beta: Initial coefficient, above 0.
        target: KL per token to hold, in nats, above 0.
        horizon: Number of responses over which the coefficient changes by at most 20 %, above 0.
        estimator: As for ReferenceKL.
        as_loss: Add the KL to the loss instead of the reward.
        unbiased: As for ReferenceKL.

    Attributes:
        beta: Coefficient of the next rewards or losses.
        applied: Coefficient of the rewards of the last rollout.

    Raises:
        ValueError: If an option is out of range.
    """

    name = "adaptive_kl"
    token_wise = True
    alternative = "AdaptiveKL(as_loss=True)"
    replaces = ("reference_kl",)

    def __init__(
        self,
        beta: float = 0.05,
        *,
        target: float = 0.1,
        horizon: int = 10_000,
        estimator: KLEstimator | str | None = None,
        as_loss: bool = False,
        unbiased: bool = False,
    ) -> None:
        super().__init__(beta, estimator=estimator, as_loss=as_loss, unbiased=unbiased)
        check_numbers(above=0, finite=True, beta=beta, target=target)
        check_counts(1, horizon=horizon)
        self.applied = beta
        self.target = target
        self.horizon = horizon
        self.reads = ("old_logprobs", "ref_logprobs")

    @override
    def observe(self, rollout: Rollout) -> None:
        self.applied = self.beta
        raw = self.estimator(rollout.require("old_logprobs"), self.frozen_logprobs(rollout))
        per_row = torch.where(rollout.trained, row_mean(raw, rollout.valid_tokens), 0.0).double()
        total, number = self.collectives.sum(torch.stack([per_row.sum(), rollout.trained.sum().double()])).tolist()
        if number:
            self.adapt(total / number, int(number))

    def adapt(self, measured: float, number: int) -> None:
        """Update the coefficient from the mean KL per token of a number of responses; a NaN changes nothing."""
        if math.isnan(measured):
            return
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        horizons, rest = divmod(number, self.horizon)
        factor = (1 + error) ** min(horizons, MAX_HORIZONS) * (1 + error * rest / self.horizon)
        self.beta = min(max(self.beta * factor, RANGE.tiny), RANGE.max)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        beta = torch.full_like(view.logprobs, self.beta if self.as_loss else self.applied)
        return {**super().metrics(view), "adaptive_kl/beta": Stat.of(beta, view.valid_tokens)}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta, "applied": self.applied}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.beta = state_dict["beta"]
        self.applied = state_dict.get("applied", self.beta)
