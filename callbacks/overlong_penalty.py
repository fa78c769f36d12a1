r"""Overlong penalty: a penalty that falls from 0 to -1 as a response approaches the maximum length.

.. math::
    p(L) = \operatorname{clip}\Bigl(\frac{M - C - L}{C},\ -1,\ 0\Bigr)

with :math:`L` the length of the response, :math:`M` the maximum and :math:`C` the cache below it. The penalty is added
to the task reward before normalization. A row without a reward (:class:`~lightning_rl.callbacks.NoEOSMask`) keeps the
penalty with a per-token estimator and has no advantage with a group-relative one.

Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
"""

from typing import cast

from jaxtyping import Float
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import Rollout
from lightning_rl.utils.arguments import check_counts, check_numbers


class OverlongPenalty(RLCallback):
    """Soft penalty on length.

    Logs the mean penalty as ``overlong_penalty/penalty`` and the fraction of penalized responses as
    ``overlong_penalty/punished``.

    Args:
        max_length: Maximum length M, usually the module's ``max_new_tokens``.
        cache: Length C of the interval below it.
        coef: Coefficient of the penalty.

    Raises:
        ValueError: Unless ``0 < cache <= max_length`` and ``coef >= 0``; at setup, if ``max_length > max_new_tokens``.
    """

    name = "overlong_penalty"

    def __init__(self, max_length: int, cache: int, *, coef: float = 1.0) -> None:
        check_counts(1, max_length=max_length, cache=cache)
        if cache > max_length:
            raise ValueError(f"expected cache <= max_length, got {cache} and {max_length}")
        check_numbers(at_least=0, finite=True, coef=coef)
        self.max_length = max_length
        self.cache = cache
        self.coef = coef

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        limit = cast(RLLightningModule, pl_module).options.sampling.max_new_tokens
        if self.max_length > limit:
            raise ValueError(
                f"expected max_length of OverlongPenalty to be at most max_new_tokens={limit}, got {self.max_length}: "
                f"no response is that long; use OverlongPenalty({limit}, {min(self.cache, limit)})"
            )

    @override
    def reward_bonus(self, rollout: Rollout) -> Float[Tensor, " B"]:
        return self.coef * self._penalty(rollout)

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        penalty = self._penalty(rollout)
        stats = Stat.many({"penalty": penalty, "punished": penalty < 0}, rollout.real)
        return {f"overlong_penalty/{key}": stat for key, stat in stats.items()}

    def _penalty(self, rollout: Rollout) -> Tensor:
        excess = self.max_length - self.cache - rollout.sampled_lengths
        return (excess.double() / self.cache).clamp(-1.0, 0.0).to(rollout.rewards.dtype)
