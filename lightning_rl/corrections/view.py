"""LossView: what a loss or a correction sees of one microbatch during an update."""

from dataclasses import dataclass, field

from jaxtyping import Float, Shaped
from torch import Tensor

from lightning_rl.rollout import TOKEN, Rollout, along


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossView(Rollout):
    """Every :class:`Rollout` field of a microbatch, padded to its longest response, and the current policy's outputs.

    ``old_logprobs`` and ``advantages`` are always there. At tokens outside ``valid_tokens`` every log-probability is 0.

    Attributes:
        logprobs: log-probability of each token under the policy being trained, with gradient, shape [b, T].
        entropy: its entropy before each token, in nats, shape [b, T]; with gradient only if an entropy bonus trains.
        current_values: the critic's predictions, with gradient, shape [b, T]; None without a critic.
        prepared: what the loss found out about these tokens from the whole optimizer step, shape [b, T]; None for a
            loss that does not ask.
    """

    logprobs: Float[Tensor, "B T"] = field(metadata=along(TOKEN))
    entropy: Float[Tensor, "B T"] = field(metadata=along(TOKEN))
    current_values: Float[Tensor, "B T"] | None = field(default=None, metadata=along(TOKEN))
    prepared: Shaped[Tensor, "B T"] | None = field(default=None, metadata=along(TOKEN))
