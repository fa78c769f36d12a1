r"""Off-policy sequence masking: stop learning from a bad response once the policy has moved away from it.

.. math::
    \text{reject } b \iff \bar A_b < 0 \ \text{and}\ \frac{1}{|o_b|} \sum_t \log \frac{\mu(o_{b,t})}{\pi(o_{b,t})} >
    \delta

with :math:`\mu` the policy before the update (or, with ``against="rollout"``, the engine's) and :math:`\pi` the policy
being trained; the means run over the valid tokens. One decision for the whole response: it has no token axis, so no
token can escape it. A rejected response still counts in the denominator.

Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, eq. 9.
"""

from typing import Literal

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_choices, check_numbers
from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.signal.masked import row_mean

Anchor = Literal["old", "rollout"]


class OPSM(RLCallback):
    """Rejects drifted responses with negative advantage.

    Logs ``opsm/rejected``, the fraction of responses, and ``opsm/drift``, the mean drift of a response before
    rejection.

    Args:
        delta: drift allowed, in nats per token, before a bad response is rejected.
        against: the policy that drift is measured from: before the update, or the engine's.

    Raises:
        ValueError: if ``delta`` is not positive or ``against`` is unknown.
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
