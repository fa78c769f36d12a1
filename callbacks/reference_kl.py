r"""Reference KL: keep the policy near a frozen reference, as a penalty in the reward or as a term of the loss.

.. math::
    r^{KL}_{b,t} = -\beta\,\operatorname{estimator}\bigl(\log \pi_{\text{old}}(o_{b,t}),\ \log
    \pi_{\text{ref}}(o_{b,t})\bigr)
    \qquad\text{or}\qquad
    \ell_{b,t} = \operatorname{estimator}\bigl(\log \pi_\theta(o_{b,t}),\ \log \pi_{\text{ref}}(o_{b,t})\bigr)

The first form shapes the reward of a per-token estimator (PPO), the second, ``as_loss=True``, goes with estimators of
one scalar for each row (GRPO) and is reduced over all valid tokens. Either way the raw KL is measured from untouched
log-probabilities and is another tensor than the penalty.

Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; as a loss: Shao et al. 2024 (GRPO), arXiv:2402.03300; unbiased:
DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, eq. 7.
"""

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.callbacks._frozen_kl import FrozenKL
from lightning_rl.rollout import Rollout


class ReferenceKL(FrozenKL):
    """Penalises distance from the reference.

    Logs ``reference_kl/estimate``, the raw estimate of each valid token of the policy being trained, and
    ``reference_kl/positive``, the fraction of tokens where it is above 0, so where the penalty is one; the core logs
    ``kl/ref`` and ``kl/penalty`` or ``reference_kl/loss``.

    Args:
        beta: what the KL is multiplied with.
        estimator: ``k1``, ``abs``, ``k2``, ``k3``, ``binary_kl``, or a function of (logprobs, other) such as a
            :class:`~lightning_rl.signal.kl.Clamped`; by default ``k1`` as a reward and ``k3`` as a loss.
        as_loss: a term of the loss instead of a reward of each token.
        unbiased: multiply the term with the importance ratio of current to old policy, gradient included, which makes
            ``k1`` and ``k3`` unbiased in value and gradient; only with ``as_loss``.

    Raises:
        ValueError: if the estimator is unknown, ``beta`` is negative, or ``unbiased`` comes without ``as_loss``.
    """

    name = "reference_kl"
    alternative = "ReferenceKL(as_loss=True)"
    frozen = ("ref_logprobs",)

    @override
    def frozen_logprobs(self, rows: Rollout) -> Float[Tensor, "B T"]:
        return rows.require("ref_logprobs")
