"""FrozenKL: base class of the KL corrections towards a frozen policy."""

import warnings
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossTerm, LossView, RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.signal.kl import KL_ESTIMATORS, KLEstimator, importance, kl_estimator
from lightning_rl.utils.arguments import check_bools, check_numbers

WARN_AS_LOSS = {
    "k1": "its expected gradient is zero, so it trains nothing",
    "abs": "its gradient is not that of a divergence and does not shrink near the frozen policy",
    "binary_kl": "its gradient vanishes with the token's probability, so it does not restore rare tokens",
}


class FrozenKL(RLCallback):
    """Penalty on the KL to a frozen policy, in the reward or in the loss; arguments as for ReferenceKL.

    Attributes:
        frozen: Names of the fields that hold the log-probabilities of the frozen policy.
    """

    frozen: ClassVar[tuple[str, ...]] = ()
    penalizes_kl = True

    def __init__(
        self,
        beta: float = 0.05,
        *,
        estimator: KLEstimator | str | None = None,
        as_loss: bool = False,
        unbiased: bool = False,
    ) -> None:
        check_numbers(at_least=0, finite=True, beta=beta)
        check_bools(as_loss=as_loss, unbiased=unbiased)
        if unbiased and not as_loss:
            raise ValueError("expected as_loss=True with unbiased=True: a reward has no gradient to correct")
        self.beta = beta
        self.estimator = kl_estimator(("k3" if as_loss else "k1") if estimator is None else estimator)
        self.as_loss = as_loss
        self.unbiased = unbiased
        self.reads = () if as_loss else ("old_logprobs", *self.frozen)
        self.reads_at_loss = ("old_logprobs", *self.frozen) if unbiased else self.frozen
        for kl_name, reason in WARN_AS_LOSS.items() if as_loss else ():
            if self.estimator is KL_ESTIMATORS[kl_name] and not (unbiased and kl_name == "k1"):
                depth = sum("__init__" in vars(kind) for kind in type(self).__mro__ if issubclass(kind, FrozenKL))
                text = f"{type(self).__name__} with {kl_name} as a loss: {reason}"
                warnings.warn(text, stacklevel=depth + 1)  # the caller's line

    def frozen_logprobs(self, rows: Rollout) -> Float[Tensor, "B T"]:
        """Return the log-probability of each token under the frozen policy."""
        raise NotImplementedError

    @property
    @override
    def contributes(self) -> frozenset[str]:
        """Methods that the class overrides, with either ``token_reward`` or ``loss_term``."""
        return super().contributes - {"token_reward" if self.as_loss else "loss_term"}

    @override
    def token_reward(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        return -self.beta * self.estimator(rollout.require("old_logprobs"), self.frozen_logprobs(rollout))

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        per_token = self.estimator(view.logprobs, self.frozen_logprobs(view))
        if self.unbiased:
            per_token = importance(view.logprobs, view.require("old_logprobs")) * per_token
        return LossTerm(per_token=per_token, coef=self.beta)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        raw = self.estimator(view.logprobs.detach(), self.frozen_logprobs(view))
        stats = Stat.many({"estimate": raw, "positive": raw > 0}, view.valid_tokens)
        return {f"{type(self).name}/{key}": stat for key, stat in stats.items()}
