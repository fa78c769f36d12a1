r"""Geometric mask: leave out responses whose mean mismatch between engine and trainer is too large.

.. math::
    \text{keep } b \iff \alpha \le \exp\Bigl(\frac{1}{|o_b|} \sum_t
    \log \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})}\Bigr) \le \beta

with :math:`\pi_{\text{old}}` the trainer's policy before the update, over the valid tokens. One decision for the whole
response, which still counts in the denominator. The geometric mean does not depend on the length of the response.

Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
"""

from lightning_rl.callbacks._sequence_ratio_mask import SequenceRatioMask


class GeometricMask(SequenceRatioMask):
    """Masks responses by the geometric mean of their ratios.

    Logs ``geometric_mask/ratio`` and ``geometric_mask/ratio_max`` before the mask, and the core's
    ``geometric_mask/rejected``.

    Args:
        low: smallest mean ratio that is kept, in [0, 1].
        high: largest mean ratio that is kept, at least 1.

    Raises:
        ValueError: if a bound is out of range.
    """

    name = "geometric_mask"
    geometric = True

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        super().__init__(low, high)
