r"""Product mask: leave out responses that the trainer would have sampled much more or less often than the engine.

.. math::
    \text{keep } b \iff \alpha \le \prod_t
    \frac{\pi_{\text{old}}(o_{b,t})}{\pi_{\text{rollout}}(o_{b,t})} \le \beta

with :math:`\pi_{\text{old}}` the trainer's policy before the update, over the valid tokens. One decision for the whole
response, which still counts in the denominator. The product grows with the length of the response;
:class:`~lightning_rl.callbacks.GeometricMask` does not.

Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
"""

from lightning_rl.callbacks._sequence_ratio_mask import SequenceRatioMask


class ProductMask(SequenceRatioMask):
    """Masks responses by the product of their ratios.

    Logs ``product_mask/ratio`` and ``product_mask/ratio_max`` before the mask, and the core's
    ``product_mask/rejected``.

    Args:
        low: smallest product that is kept, in [0, 1].
        high: largest product that is kept, at least 1.

    Raises:
        ValueError: if a bound is out of range.
    """

    name = "product_mask"
    geometric = False

    def __init__(self, low: float = 0.5, high: float = 2.0) -> None:
        super().__init__(low, high)
