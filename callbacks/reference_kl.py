r"""Reference KL: penalize the KL to a frozen reference policy, in the reward or in the loss.

.. math::
    r^{KL}_{b,t} = -\beta\,\operatorname{estimator}\bigl(\log \pi_{\text{old}}(o_{b,t}),\ \log
    \pi_{\text{ref}}(o_{b,t})\bigr)
    \qquad\text{or}\qquad
    \ell_{b,t} = \operatorname{estimator}\bigl(\log \pi_\theta(o_{b,t}),\ \log \pi_{\text{ref}}(o_{b,t})\bigr)

The first form shapes the reward of a per-token estimator (PPO). The second, ``as_loss=True``, is for estimators of one
advantage per response (GRPO) and is reduced over all valid tokens.

Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; as a loss: Shao et al. 2024 (GRPO), arXiv:2402.03300; unbiased:
DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, eq. 7.
"""

from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.callbacks._frozen_kl import FrozenKL
from lightning_rl.rollout import Rollout


class ReferenceKL(FrozenKL):
    """Penalty on the KL to the reference policy.

    Logs the estimate of the policy being trained as ``reference_kl/estimate``, the fraction of tokens where it is
    positive as ``reference_kl/positive``, ``kl/ref``, and ``kl/penalty`` or ``reference_kl/loss``.

    Args:
        beta: Coefficient of the KL.
        estimator: ``k1``, ``abs``, ``k2``, ``k3``, ``binary_kl``, or a function of (logprobs, other) such as a
            :class:`~lightning_rl.signal.kl.Clamped`; by default ``k1`` in the reward and ``k3`` in the loss.
        as_loss: Add the KL to the loss instead of the reward.
        unbiased: Multiply the term by the importance ratio of current to old policy, with gradient, which makes ``k1``
            and ``k3`` unbiased in value and gradient; requires ``as_loss``.

    Raises:
        ValueError: If the estimator is unknown, ``beta`` is negative, or ``unbiased`` is set without ``as_loss``.
    """

    name = "reference_kl"
    token_wise = True
    alternative = "ReferenceKL(as_loss=True)"
    frozen = ("ref_logprobs",)

    @override
    def frozen_logprobs(self, rows: Rollout) -> Float[Tensor, "B T"]:
        return rows.require("ref_logprobs")
