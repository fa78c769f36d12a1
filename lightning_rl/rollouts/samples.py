"""Sampled: what an engine made of some prompts, before anybody has scored it; it can wait, and be saved, like that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_rl.data import Prompt
from lightning_rl.generation import Request
from lightning_rl.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an engine is asked for at once.

    Args:
        prompts: of this rank.
        requests: for the samples that train, the same number for each prompt, in the order of the prompts.
        greedy: for a greedy answer to each prompt that never trains; None if nobody compares with it.
    """

    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    greedy: Sequence[Request] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The answer to an :class:`Order`: rows without rewards.

    Args:
        prompts: of this rank.
        samples: the same number of rows for each prompt, in the order of the prompts.
        greedy: a row for each prompt, or None.
    """

    prompts: Sequence[Prompt]
    samples: Rollout
    greedy: Rollout | None = None

    def state(self) -> dict[str, Any]:
        """Plain values and tensors that load under ``weights_only=True``, without the prompts."""
        return {"samples": self.samples.state(), "greedy": None if self.greedy is None else self.greedy.state()}

    @staticmethod
    def from_state(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> "Sampled":
        """The inverse of :meth:`state`, with the prompts that were sampled."""
        greedy: Mapping[str, Tensor] | None = state["greedy"]
        return Sampled(
            prompts=prompts,
            samples=Rollout.from_state(state["samples"]),
            greedy=None if greedy is None else Rollout.from_state(greedy),
        )
