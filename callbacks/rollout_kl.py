r"""Rollout KL: add the KL between the current policy and the engine's policy to the loss.

.. math::
    \ell_{b,t} = \operatorname{estimator}\bigl(\log \pi_\theta(o_{b,t}),\ \log \pi_{\text{rollout}}(o_{b,t})\bigr)

The term is reduced over all valid tokens; masks and weights of other corrections do not apply to it. The default,
``k2``, has the gradient :math:`\log \pi_\theta - \log \pi_{\text{rollout}}`, which grows with the drift. ``k1`` has a
constant gradient: minimizing it on samples of the engine drives the two policies apart.

Source: Schulman 2020, "Approximating KL Divergence"; as a loss: Tang and Munos 2025, arXiv:2506.09477.
"""

import warnings

from typing_extensions import override

from lightning_rl.corrections import LossTerm, LossView, RLCallback, Stat
from lightning_rl.signal.kl import KLEstimator, absolute, k1, kl_estimator
from lightning_rl.utils.arguments import check_numbers

DRIFTED_BEYOND = 1e-3  # nats; above rounding, so that the fraction does not depend on microbatches


class RolloutKL(RLCallback):
    """KL between trainer and engine as a term of the loss.

    Logs the estimate as ``rollout_kl/estimate``, the fraction of tokens whose two log-probabilities differ by more than
    0.001 nats as ``rollout_kl/drifted``, and ``rollout_kl/loss``.

    Args:
        coef: Coefficient of the term.
        estimator: ``k1``, ``abs``, ``k2``, ``k3``, ``binary_kl``, or a function of (logprobs, other) such as a
            :class:`~lightning_rl.signal.kl.Clamped`.

    Raises:
        ValueError: If the estimator is unknown or ``coef`` is negative.
    """

    name = "rollout_kl"
    token_wise = True
    reads_at_loss = ("rollout_logprobs",)

    def __init__(self, coef: float = 1e-3, *, estimator: KLEstimator | str = "k2") -> None:
        check_numbers(at_least=0, finite=True, coef=coef)
        self.coef = coef
        self.estimator = kl_estimator(estimator)
        if self.estimator in (k1, absolute):
            warnings.warn(
                f"RolloutKL with {'k1' if self.estimator is k1 else 'abs'}: its gradient does not shrink with the "
                "drift, and for k1 on samples of the engine it increases KL(rollout || policy): use k2",
                stacklevel=2,
            )

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        rollout = view.require("rollout_logprobs")
        return LossTerm(per_token=self.estimator(view.logprobs, rollout), coef=self.coef)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        logprobs, rollout = view.logprobs.detach(), view.require("rollout_logprobs")
        values = {"estimate": self.estimator(logprobs, rollout), "drifted": (logprobs - rollout).abs() > DRIFTED_BEYOND}
        stats = Stat.many(values, view.valid_tokens)
        return {f"rollout_kl/{key}": stat for key, stat in stats.items()}
