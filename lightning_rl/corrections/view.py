"""LossView: a microbatch during the update, the input of losses and corrections, with the outputs of the forward."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtyping import Float, Shaped
from torch import Tensor

from lightning_rl.fields import TOKEN, Field, declare, fields_of
from lightning_rl.rollout import EXPERT_LOAD, TOP_IDS, TOP_LOGPROBS, Rollout


class Outputs(NamedTuple):
    """Outputs of a forward for each response position, 0 outside of the valid tokens; shapes [b, T].

    Log-probabilities [[-0.7, -1.2, 0.0]] and entropy [[1.1, 1.3, 0.0]] of a row with two valid tokens.

    :class:`LossView` declares those that losses and corrections get.
    """

    logprobs: Float[Tensor, "b T"]
    entropy: Float[Tensor, "b T"]
    values: Float[Tensor, "b T"] | None = None
    sum_pi_squared: Float[Tensor, "b T"] | None = None
    rollout_kl: Float[Tensor, "b T"] | None = None
    router_loss: Float[Tensor, "b T"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossView(Rollout):
    """:class:`Rollout` fields of a microbatch, padded to its longest response, and the current policy's outputs.

    One row: advantages [[1.0, 1.0]], old_logprobs [[-0.7, -1.3]], logprobs [[-0.7, -1.2]] with gradient.
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

    logprobs: Float[Tensor, "B T"] = field(metadata=declare(TOKEN, shown=True, output="logprobs"))
    entropy: Float[Tensor, "B T"] = field(metadata=declare(TOKEN, shown=True, output="entropy"))
    current_values: Float[Tensor, "B T"] | None = field(
        default=None, metadata=declare(TOKEN, shown=True, output="values")
    )
    rollout_kl: Float[Tensor, "B T"] | None = field(
        default=None, metadata=declare(TOKEN, output="rollout_kl", inputs=(TOP_IDS, TOP_LOGPROBS))
    )
    router_loss: Float[Tensor, "B T"] | None = field(
        default=None, metadata=declare(TOKEN, output="router_loss", inputs=(EXPERT_LOAD,))
    )
    prepared: Shaped[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN))

    def outputs(self) -> Iterator[tuple[Field, Tensor]]:
        """Yield the outputs of the forward that are not None, with their fields."""
        for spec in OUTPUTS:
            if (output := getattr(self, spec.name)) is not None:
                yield spec, output

    def further_leaves(self) -> dict[str, Tensor]:
        """Return copies with gradient of the outputs that the forward computes from entries of dict fields."""
        return {spec.name: output.detach().requires_grad_() for spec, output in self.outputs() if spec.inputs}


OUTPUTS = tuple(spec for spec in fields_of(LossView) if spec.output)
"""Fields of a view that the policy's forward computes."""


def outputs_from(entry: str) -> set[str]:
    """Return the names in a view of the outputs that the forward computes from an entry of a dict field."""
    return {spec.name for spec in OUTPUTS if entry in spec.inputs}
