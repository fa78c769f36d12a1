"""Requests to an engine, their completions, and the reasons for which these end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor
from typing_extensions import override

from lightning_rl.samples.media import Media
from lightning_rl.samples.prompt import Prompt
from lightning_rl.samples.sampling_params import SamplingParams

POLICY = "policy"
"""Name of the trained model, and role of its tokens unless a program names another."""


class FinishReason(IntEnum):
    """Reason why a response ended, as reported by the engine or the environment."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    TURNS = 3  # limit on turns in a conversation
    FAILED = 4  # failure of the environment

    @override
    def __reduce_ex__(self, proto: Any) -> tuple[type["FinishReason"], tuple[int]]:
        """Pickle by value; Python 3.11.0 to 3.11.3 would pickle a call of getattr, which ``weights_only`` refuses."""
        return type(self), (self.value,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn of a sample to generate: prefix (3, 4), sample 515 of rollout 3, turn 0.

    Its random numbers come from its own seed, so they do not depend on its batch.

    Args:
        prefix_ids: Token ids to continue, at least one.
        sample_id: Id of the sample, unchanged when it is retried.
        seed: Seed of 31 bits, see :func:`request_seed`.
        sampling: Sampling parameters; ``eos_token_ids`` may be empty, but not None.
        turn: Number of the turn in a conversation.
        rollout: Number of the rollout; where requests queue, those of the lowest rollout come first.
        attempt: Number of the try, 1 for the second try of an environment that failed.
        media: Pictures of the prefix; None without.
        role: Name of the model in the call of a program.

    Raises:
        ValueError: If there is no prompt, or ``eos_token_ids`` is None.
    """

    prefix_ids: tuple[int, ...]
    sample_id: int
    seed: int
    sampling: SamplingParams
    turn: int = 0
    rollout: int = 0
    attempt: int = 0
    media: Media | None = None
    role: str = POLICY

    @classmethod
    def of(cls, prompt: Prompt, *, sample_id: int, seed: int, sampling: SamplingParams, rollout: int = 0) -> "Request":
        """Return the first request of a sample, which continues a prompt with its pictures."""
        parts: dict[str, Any] = {"prefix_ids": prompt.token_ids, "media": prompt.media}
        return cls(**parts, sample_id=sample_id, seed=seed, sampling=sampling, rollout=rollout)

    def __post_init__(self) -> None:
        """Check that there are a prompt and EOS ids."""
        if not self.prefix_ids:
            raise ValueError(f"expected a prompt of at least one token for sample {self.sample_id}, got none")
        if self.sampling.eos_token_ids is None:
            raise ValueError(f"expected eos_token_ids, which may be empty, for sample {self.sample_id}, got None")

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Rollout, sample, turn and attempt, by which requests that are not answered yet differ."""
        return self.rollout, self.sample_id, self.turn, self.attempt

    @property
    def prompt_key(self) -> tuple[tuple[int, ...], int]:
        """Prefix and hash of its pictures, by which prompts differ."""
        return self.prefix_ids, 0 if self.media is None else self.media.key

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end the response, in ascending order."""
        return tuple(self.sampling.eos_token_ids or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Response to a request: ids (5, 1), log-probabilities [-0.7, -0.1], finish STOP, version 7.

    Args:
        token_ids: Ids of the response, with EOS if it was sampled.
        logprobs: Log-probability of each token under the distribution it was sampled from, float32; None if not
            requested.
        finish: Reason for the end; ABORT for a failed sample, which does not train.
        version: Version of the weights when the request was sent.
        versions: Version of the weights of each token, if a sync came in between; None if all are ``version``.
        token_extras: Further data of each token by name, [L, ...]; see :meth:`Engine.select_extras`.
        prompt_extras: Further data of each prompt token by name, [P, ...].
        sample_id: Id of the request's sample, by which a wrong order is detected; None if unknown.

    Raises:
        ValueError: If the number of versions differs from that of tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: Float[Tensor, " L"] | None
    finish: FinishReason
    version: int
    versions: tuple[int, ...] | None = None
    token_extras: Mapping[str, Shaped[Tensor, "L ..."]] = field(default_factory=dict)
    prompt_extras: Mapping[str, Shaped[Tensor, "P ..."]] = field(default_factory=dict)
    sample_id: int | None = None

    def __post_init__(self) -> None:
        """Check the number of versions."""
        if self.versions is not None and len(self.versions) != len(self.token_ids):
            raise ValueError(f"expected a version for each of {len(self.token_ids)} tokens, got {len(self.versions)}")
