"""LossView: a microbatch during the update, the input of losses and corrections."""

from dataclasses import dataclass, field

from jaxtyping import Float, Shaped
from torch import Tensor

from lightning_rl.fields import TOKEN, declare
from lightning_rl.rollout import Rollout

FURTHER_OUTPUTS = ("rollout_kl", "router_loss")
"""Outputs of the policy's forward besides log-probabilities, entropy and values; each is None unless it is read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossView(Rollout):
    """:class:`Rollout` fields of a microbatch, padded to its longest response, and the current policy's outputs.

    ``old_logprobs`` and ``advantages`` are always set. At invalid tokens every log-probability is 0.

    Attributes:
        logprobs: Log-probability of each token under the policy being trained, with gradient, shape [b, T].
        entropy: Entropy before each token, in nats, shape [b, T]; with gradient only if an entropy bonus trains.
        current_values: Predictions of the critic, with gradient, shape [b, T]; None without a critic.
        rollout_kl: KL of the engine's distribution from the policy's before each token, in nats, with gradient, shape
            [b, T]; None unless a correction records the engine's likeliest tokens.
        router_loss: Load-balancing loss of the routers where each token is predicted, with gradient, shape [b, T]; None
            unless a correction reads it.
        prepared: Output of the loss's ``prepare`` for these tokens, shape [b, T]; None for a loss without it.
    """

    logprobs: Float[Tensor, "B T"] = field(metadata=declare(TOKEN))
    entropy: Float[Tensor, "B T"] = field(metadata=declare(TOKEN))
    current_values: Float[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN))
    rollout_kl: Float[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN))
    router_loss: Float[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN))
    prepared: Shaped[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN))
