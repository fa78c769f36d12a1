r"""Score centering: remove the drift of the policy that a mismatch of engine and trainer causes at any reward.

A token is sampled from the engine's distribution :math:`q`, which differs from the policy :math:`p` by kernels,
quantization or stale weights. Before a token, the expected update is

.. math::
    \mathbb{E}_q[A \nabla \log p] = \mathbb{E}_q[A]\, \mathbb{E}_q[\nabla \log p]
    + \operatorname{Cov}_q(A, \nabla \log p)

With :math:`q = p` the first term is 0. Otherwise it pulls the policy towards the engine or away from it, whichever
tokens are good. Advantages that are centered over a group do not remove it, because before a token their mean is not 0.
So the gradient of each token is centered:

.. math::
    c_t \bigl(\nabla \log p(a_t) - \mathbb{E}_q[\nabla \log p]\bigr)
    = c_t \nabla \bigl(\log p(a_t) + \operatorname{KL}(q_t \,\|\, p_t)\bigr), \qquad
    c_t = \frac{\partial \ell}{\partial \log p(a_t)}

because :math:`\mathbb{E}_q[\nabla \log p] = -\nabla \operatorname{KL}(q \,\|\, p)`. The term of a token is its KL
times :math:`c_t`, without gradient: the derivative of the reduced policy loss by the token's log-probability, for any
loss. It contains the weight of the reduction, advantage, ratio, masks and weights of other corrections, so :math:`c_t =
-w_t m_t A_t r_t` for PPO's loss, and 0 for a token that is masked or clipped away. A factor that depends on the token
itself is part of :math:`A` above: the expected update is its covariance with the score.

With an importance weight :math:`p / q` of each token or response the first term is 0 already, and centering would add
it with the other sign. So this correction replaces :class:`~lightning_rl.callbacks.TruncatedIS` and
:class:`~lightning_rl.callbacks.OffPolicyIS`, and does not suit losses with such a weight. Masks compose with it.

With k of the vocabulary's tokens, :math:`K`, the rest :math:`1 - Q` of the engine's probability is spread over all
other tokens in proportion to :math:`p`:

.. math::
    \operatorname{KL} \approx \sum_{v \in K} q_v \log \frac{q_v}{p_v} + (1 - Q) \log \frac{1 - Q}{1 - P}, \qquad
    Q = \sum_{v \in K} q_v, \quad P = \sum_{v \in K} p_v

This is exact if :math:`q` is proportional to :math:`p` outside of :math:`K`. Otherwise the expected gradient of the
logits is off by :math:`q_v - (1 - Q)\, p_v / (1 - P)` at each token outside of :math:`K`, in total at most
:math:`2 (1 - Q)` times the total variation of the two distributions of those tokens, so at most :math:`2 (1 - Q)`.

Source: Marek and Ryabinin 2026, arXiv:2609.20807.
"""

from typing import cast

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_rl.corrections import LossTerm, LossView, RLCallback, Stat
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import TOP_IDS, TOP_LOGPROBS
from lightning_rl.utils.arguments import check_counts


class ScoreCentering(RLCallback):
    """Subtraction of the expected score under the engine's distribution from the score of each token.

    The engine records its k likeliest tokens before each token (``token_extras/top_ids``,
    ``token_extras/top_logprobs``) at the sampling temperature, after its filters. Logs the KL of the engine's
    distribution from the policy, over these tokens and all others together, as ``score_centering/drift``, and the KL
    times its factor, summed, as ``score_centering/loss``.

    Args:
        k: Number of the engine's likeliest tokens; None for the whole vocabulary, which suits small ones.

    Raises:
        ValueError: If k is below 1; at setup, if the engine cannot record its likeliest tokens.
    """

    name = "score_centering"
    token_wise = True
    records = (TOP_IDS, TOP_LOGPROBS)
    reads_at_loss = ("rollout_kl",)
    replaces = ("off_policy_is", "truncated_is")

    def __init__(self, k: int | None = 32) -> None:
        check_counts(1, optional=True, k=k)
        self.k = k

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        cast(RLLightningModule, pl_module).options.engine.top_logprobs = self.k

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return LossTerm(per_token=view.require("rollout_kl"), coef=1.0, follows_policy_loss=True)

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"score_centering/drift": Stat.of(view.require("rollout_kl").detach(), view.valid_tokens)}
