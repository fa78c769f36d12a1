r"""Overlong penalty: a bonus that falls from 0 to -1 as a response nears its maximum length.

.. math::
    p(L) = \operatorname{clip}\Bigl(\frac{M - C - L}{C},\ -1,\ 0\Bigr)

with :math:`L` the length of the response, :math:`M` the maximum and :math:`C` the cache below it. It is added to the
task reward before any normalisation and is computed from lengths alone, so applying it twice is adding it twice and
nothing more. A row that a reward mask takes out (:class:`~lightning_rl.callbacks.NoEOSMask`) keeps the penalty with an
estimator that works per token, and has no advantage at all with one that compares the rows of a group.

Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
"""

from typing import cast

from jaxtyping import Float
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_counts, check_numbers
from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import Rollout


class OverlongPenalty(RLCallback):
    """Punishes length softly.

    Logs ``overlong_penalty/penalty``, its mean over the responses, and ``overlong_penalty/punished``, the fraction
    that it reaches.

    Args:
        max_length: the maximum M, usually the module's ``max_new_tokens``.
        cache: the interval C below it.
        coef: what the penalty is multiplied with.

    Raises:
        ValueError: unless ``0 < cache <= max_length`` and ``coef >= 0``, or at setup if no response is that long.
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
        limit = cast(RLLightningModule, pl_module).sampling.max_new_tokens
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
        return {f"overlong_penalty/{what}": stat for what, stat in stats.items()}

    def _penalty(self, rollout: Rollout) -> Tensor:
        room = self.max_length - self.cache - rollout.drawn_lengths
        return (room / self.cache).clamp(-1.0, 0.0).to(rollout.rewards.dtype)
