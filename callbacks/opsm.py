r"""Off-policy sequence masking: mask responses with negative advantage that became less likely.

.. math::
    \text{reject } b \iff \bar A_b < 0 \ \text{and}\ \frac{1}{|o_b|} \sum_t \log \frac{\mu(o_{b,t})}{\pi(o_{b,t})} >
    \delta

:math:`\pi` is the current policy. By default, :math:`\mu` is the policy before the first optimizer step on the rollout
(``old_logprobs``), so nothing is masked in that first step. With ``against="rollout"``, :math:`\mu` is the policy as
the inference engine evaluated it while sampling (``rollout_logprobs``). :math:`\bar A_b` is the mean advantage of
response b. The drift of a response is the mean of the log-ratio over its :math:`|o_b|` valid tokens. A positive drift
means that the response became less likely. Rejected responses count in the loss's denominator.

Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, eq. 9.
"""

from typing import Literal

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.masked import row_mean
from lightning_rl.utils.arguments import check_choices, check_numbers

Anchor = Literal["old", "rollout"]


class OPSM(RLCallback):
    """Masks a response in the policy loss if its advantage is negative and its drift exceeds a threshold.

    This callback logs ``opsm/drift``, the mean drift of the responses that are trained on. ``RLLightningModule`` logs
    ``opsm/rejected``, the fraction of responses that are masked.

    Args:
        delta: Threshold of the drift, in nats per token.
        against: Policy to compare with: ``"old"`` (before the first step) or ``"rollout"`` (engine).

    Raises:
        ValueError: If ``delta`` is not positive or ``against`` is unknown.
    """

    name = "opsm"
    alternative = 'OPSM(against="rollout")'

    def __init__(self, delta: float = 1e-4, *, against: Anchor = "old") -> None:
        check_numbers(above=0, delta=delta)
        check_choices(("old", "rollout"), against=against)
        self.delta = delta
        self.against = against
        self.reads_at_loss = (f"{against}_logprobs",)

    @override
    def sequence_mask(self, view: LossView) -> Bool[Tensor, " B"]:
        advantage = row_mean(view.require("advantages"), view.valid_tokens)
        return ~((advantage < 0) & (self._drift(view) > self.delta))

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        return {"opsm/drift": Stat.of(self._drift(view), view.trained)}

    def _drift(self, view: LossView) -> Tensor:
        drift = view.require(f"{self.against}_logprobs") - view.logprobs.detach()
        return row_mean(drift, view.valid_tokens)
