r"""Reference KL: keep the policy near a frozen reference, as a penalty in the reward or as a term of the loss.

.. math::
    r^{KL}_{b,t} = -\beta\,\operatorname{estimator}\bigl(\log \pi_{\text{old}}(o_{b,t}),\ \log
    \pi_{\text{ref}}(o_{b,t})\bigr)
    \qquad\text{or}\qquad
    \ell_{b,t} = \operatorname{estimator}\bigl(\log \pi_\theta(o_{b,t}),\ \log \pi_{\text{ref}}(o_{b,t})\bigr)

The first form shapes the reward of a per-token estimator (PPO), the second, ``as_loss=True``, goes with estimators of
one scalar for each row (GRPO) and is reduced over all valid tokens. Either way the raw KL is measured from untouched
log-probabilities and is another tensor than the penalty.

Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; as a loss: Shao et al. 2024 (GRPO), arXiv:2402.03300.
"""

import warnings

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.hooks import LossTerm, LossView, RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.signal.kl import kl_estimator

WARN_AS_LOSS = {
    "k1": "its expected gradient is zero, so it trains nothing",
    "abs": "its gradient is that of no divergence and does not shrink near the reference",
}


class ReferenceKL(RLCallback):
    """Penalises distance from the reference.

    Logs ``reference_kl/estimate``, the raw estimate of each valid token of the policy being trained, and
    ``reference_kl/positive``, the fraction of tokens where it is above 0, so where the penalty is one; the core logs
    ``kl/ref`` and ``kl/penalty`` or ``reference_kl/loss``.

    Args:
        beta: what the KL is multiplied with.
        estimator: ``k1``, ``abs``, ``k2`` or ``k3``; by default ``k1`` as a reward and ``k3`` as a loss.
        as_loss: a term of the loss instead of a reward of each token.

    Raises:
        ValueError: if the estimator is unknown or ``beta`` is negative.
    """

    name = "reference_kl"
    alternative = "ReferenceKL(as_loss=True)"

    def __init__(self, beta: float = 0.05, *, estimator: str | None = None, as_loss: bool = False) -> None:
        if not beta >= 0:
            raise ValueError(f"expected beta >= 0, got {beta}")
        chosen = ("k3" if as_loss else "k1") if estimator is None else estimator
        self.beta = beta
        self.estimator = kl_estimator(chosen)
        self.as_loss = as_loss
        self.reads = () if as_loss else ("old_logprobs", "ref_logprobs")
        self.reads_at_loss = ("ref_logprobs",)
        if as_loss and chosen in WARN_AS_LOSS:
            warnings.warn(f"ReferenceKL with {chosen} as a loss: {WARN_AS_LOSS[chosen]}", stacklevel=2)

    @property
    @override
    def contributes(self) -> frozenset[str]:
        """Either a token reward or a loss term, and its metrics."""
        return frozenset({"loss_term" if self.as_loss else "token_reward", "metrics"})

    @override
    def token_reward(self, rollout: Rollout) -> Float[Tensor, "B T"]:
        return -self.beta * self.estimator(rollout.required("old_logprobs"), rollout.required("ref_logprobs"))

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return LossTerm(per_token=self.estimator(view.logprobs, view.required("ref_logprobs")), coef=self.beta)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        raw = self.estimator(view.logprobs.detach(), view.required("ref_logprobs"))
        stats = Stat.many({"estimate": raw, "positive": raw > 0}, view.valid_tokens)
        return {f"reference_kl/{what}": stat for what, stat in stats.items()}
