r"""Router auxiliary loss: spread the tokens of a mixture of experts evenly over its experts.

.. math::
    \mathcal{L} = E \sum_{e=1}^{E} f_e P_e, \qquad
    f_e = \frac{1}{NR} \sum_{n,r} \mathbb{1}\bigl[e \in \operatorname{top}_k p_{n,r}\bigr], \qquad
    P_e = \frac{1}{NR} \sum_{n,r} p_{n,r,e}

:math:`p_{n,r}` is the softmax of router :math:`r` of :math:`R` over its :math:`E` experts, at the input that predicts
token :math:`n` of the :math:`N` valid tokens of the optimizer step, over all microbatches and ranks. Like the loss of
transformers it is :math:`k` for an even load, and its experts are the :math:`k` likeliest, also where a bias or router
replay chooses others. :math:`f` has no gradient, so the loss is a mean over tokens:

.. math::
    \mathcal{L} = \frac{1}{N} \sum_n \ell_n, \qquad \ell_n = \frac{E}{R} \sum_{r,e} f_e\, p_{n,r,e}

:math:`f` is that of the policy before its first step on the rollout, from the pass that computes old log-probabilities.
In later steps on the rollout the policy has moved since.

Source: Fedus et al. 2021 (Switch Transformer), arXiv:2101.03961, equations 4-6.
"""

from typing import cast

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_rl.corrections import LossTerm, LossView, RLCallback
from lightning_rl.module import RLLightningModule
from lightning_rl.policy.load_balancing import check_load_balancing
from lightning_rl.signal.reductions import token_mean
from lightning_rl.utils.arguments import check_numbers


class RouterAuxLoss(RLCallback):
    """Load-balancing loss of the routers of a mixture of experts, as a mean over the tokens of the optimizer step.

    Logs the loss without its coefficient as ``router_aux_loss/loss``.

    Args:
        coef: Coefficient of the loss.

    Raises:
        ValueError: If the coefficient is negative or not finite; when a fit starts, if the policy is dense, or if
            transformers defines no such loss for it.
    """

    name = "router_aux_loss"
    token_wise = True
    reads_at_loss = ("router_loss",)

    def __init__(self, coef: float = 0.001) -> None:
        check_numbers(at_least=0, finite=True, coef=coef)
        self.coef = coef

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_load_balancing(cast(RLLightningModule, pl_module).required_policy.model)

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        return LossTerm(per_token=view.require("router_loss"), coef=self.coef, reduction=token_mean)
