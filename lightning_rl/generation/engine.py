"""The Engine protocol: what the loop asks of whoever generates, and the states an engine can be in."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.generation.filters import NO_FILTER, TokenFilter
from lightning_rl.generation.sampling import Sampling
from lightning_rl.rollout import Finish

if TYPE_CHECKING:
    from lightning_rl.generation.weights.canary import Canary


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sample to draw. Its random numbers come from its own seed, so not from the batch that it is drawn in.

    Args:
        prefix_ids: the token ids to continue, at least one.
        sample_id: identity of the sample, unchanged when it is retried.
        seed: 31 bits, see :func:`request_seed`.
        max_new_tokens: most tokens to draw.
        temperature: what the logits are divided by; 0 takes the likeliest token.
        eos_ids: ids that end the response and belong to it.
        stop: strings that end the response; the token that completes one belongs to it.
        turn: number of the turn in a conversation.
        keep: which tokens may be drawn; all by default.
    """

    prefix_ids: tuple[int, ...]
    sample_id: int
    seed: int
    sampling: "Sampling"
    turn: int = 0

    @property
    def max_new_tokens(self):
        return self.sampling.max_new_tokens

    @property
    def temperature(self):
        return self.sampling.temperature

    @property
    def eos_ids(self):
        return frozenset(self.sampling.eos_token_ids)

    @property
    def stop(self):
        return self.sampling.stop

    @property
    def keep(self):
        x = self.sampling
        return TokenFilter(top_k=x.top_k, top_p=x.top_p, min_p=x.min_p) if x.filters else NO_FILTER

    def __post_init__(self) -> None:
        """Checks what every engine relies on."""
        if not self.prefix_ids:
            raise ValueError(f"expected a prompt of at least one token for sample {self.sample_id}, got none")
        if self.max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens >= 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"expected temperature >= 0, got {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine drew for a request.

    Args:
        token_ids: the response, EOS included when it was sampled.
        logprobs: log-probability of each under the distribution it was drawn from, float32; None if not asked for.
        finish: why it ended, as the engine knows it.
        version: of the weights, pinned before the request was sent.
        versions: of the weights that each token was drawn from, where a sync came in between; None if all are
            ``version``.
        token_extras: what else was recorded about each token, by name, [L, ...]; see :meth:`Engine.record`.
        prompt_extras: what was recorded about each token of the prompt, by name, [P, ...].

    Raises:
        ValueError: if there are not as many versions as tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: Float[Tensor, " L"] | None
    finish: Finish
    version: int
    versions: tuple[int, ...] | None = None
    token_extras: Mapping[str, Shaped[Tensor, "L ..."]] = field(default_factory=dict)
    prompt_extras: Mapping[str, Shaped[Tensor, "P ..."]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what the loop relies on."""
        if self.versions is not None and len(self.versions) != len(self.token_ids):
            raise ValueError(f"expected a version for each of {len(self.token_ids)} tokens, got {len(self.versions)}")


class EngineError(RuntimeError):
    """The engine cannot generate any more, through no fault of the run, which may go on from where it stands."""


class EngineState(Enum):
    """Asleep: holds no memory. Awake: could generate, but from which weights? Synced: holds the trainer's weights."""

    ASLEEP = "asleep"
    AWAKE = "awake"
    SYNCED = "synced"


class Engine(ABC):
    """Generates for the loop, and refuses to unless it holds the trainer's weights.

    Attributes:
        returns_logprobs: whether completions can carry log-probabilities.
        filters: whether it keeps to a request's filter; its log-probabilities then are of what is left.
        records: names of what it can record about tokens besides, see :meth:`record`.
        recorded: names of what it does record.
        scores: whether :meth:`score` works.
        sleeps: whether it sleeps between a rollout and the next sync, so that the trainer has its memory.
        holds_copy: whether its weights are a copy of the trainer's, so that a sync can go wrong.
        syncs_while_generating: whether it may take weights while it generates; a completion's tokens then differ in
            version.
        canary: proves each sync of such a copy; None for no proof.
        dtype: of its weights, once it is started; None for that of the trainer.
        limit: most tokens of prompt and response together, once it is started; None for no limit.
        block: tokens that its prefix cache keeps together; 0 without such a cache.
        collective: whether ranks draw from one engine together, so that all have to call :meth:`generate` alike.
        state: asleep, awake or synced.
        version: of the weights it holds.
    """

    returns_logprobs: bool = True
    filters: bool = False
    records: frozenset[str] = frozenset()
    recorded: frozenset[str] = frozenset()
    scores: bool = False
    sleeps: bool = False
    holds_copy: bool = False
    syncs_while_generating: bool = False
    canary: "Canary | None" = None
    dtype: torch.dtype | None = None
    limit: int | None = None
    block: int = 0
    collective: bool = False

    def __init__(self) -> None:
        self.state = EngineState.ASLEEP
        self.version = -1

    @property
    def capabilities(self):
        from types import SimpleNamespace

        from lightning_rl.generation.transformers import TransformersEngine

        return SimpleNamespace(
            returns_logprobs=self.returns_logprobs,
            filters=self.filters,
            extras=self.records,
            sleeps=self.sleeps,
            collective=self.collective,
            syncs_while_generating=self.syncs_while_generating,
            shares_policy=isinstance(self, TransformersEngine),
        )

    @property
    def extras(self):
        return self.recorded

    def select_extras(self, names):
        self.record(names)

    def record(self, names: frozenset[str]) -> None:
        """Says before the start what every completion has to carry in its extras from then on.

        Raises:
            ValueError: if it cannot record one of them.
        """
        if unknown := sorted(names - self.records):
            raise ValueError(f"expected to record {sorted(self.records) or 'nothing'}, got {unknown[0]}")
        self.recorded = names

    @abstractmethod
    def start(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Builds what generates. Called after the process group exists, before the first sync."""

    def expect(self, weights: Iterable[tuple[str, Tensor]]) -> None:  # noqa: B027  most engines take any names
        """Compares the names and shapes that syncs will bring with its own, once, before the first.

        Reads the stream to its end or not at all.

        Raises:
            ValueError: naming the first tensor that differs.
        """

    def score(self, rows: Sequence[Sequence[int]]) -> list[Float[Tensor, " L1"]]:
        """Log-probability of every token of each row but the first, given all before, at temperature 1.

        Raises:
            NotImplementedError: if the engine only generates.
        """
        raise NotImplementedError(f"{type(self).__name__} only generates")

    def score_copies(self, ids: Sequence[int]) -> dict[str, Float[Tensor, " L1"]]:
        """The same for one row, by every copy of the weights that the engine has, under a name for each."""
        return {"": self.score([ids])[0]}

    def cached_tokens(self, ids: Sequence[int]) -> int:
        """Runs a prompt, which then is cached, and says how many tokens of it came out of the prefix cache."""
        del ids
        return 0

    def trace(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """What each layer puts out for a prompt, by name; empty if unknown. See :mod:`.weights.tracing`."""
        del ids
        return {}

    @abstractmethod
    def _take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the full weights, one parameter at a time."""

    @abstractmethod
    def _draw(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        """Draws one completion for each request, in their order."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes over the trainer's weights under a version number; afterwards the engine is synced."""
        if not (self.syncs_while_generating and self.state is EngineState.SYNCED):
            self.wake()
        self._take(weights)
        self.state, self.version = EngineState.SYNCED, version

    def generate(self, requests: Sequence[Request], *, logprobs: bool = False) -> list[Completion]:
        """One completion for each request, in their order.

        Raises:
            RuntimeError: if the engine is not synced.
            ValueError: if a request has a filter that the engine would ignore.
        """
        if not self.filters and any(request.keep for request in requests):
            raise ValueError(f"expected requests without top_k, top_p and min_p, which {type(self).__name__} ignores")
        if self.state is not EngineState.SYNCED:
            raise RuntimeError(
                f"expected a synced engine, got one that is {self.state.value}: load_weights comes first"
            )
        return self._draw(requests, logprobs=logprobs)

    def wake(self) -> None:
        """Takes memory again after sleep; the weights it then holds count as unknown."""
        self.state = EngineState.AWAKE

    def sleep(self) -> None:
        """Gives memory back; needs new weights before it generates again."""
        self.state = EngineState.ASLEEP

    def close(self) -> None:
        """Ends the engine."""
        self.state = EngineState.ASLEEP


def request_seed(run_seed: int, rollout: int, sample_id: int, turn: int = 0) -> int:
    """A 31-bit seed that depends on the request alone, equal in every process.

    Example:
        >>> request_seed(0, 0, 0) == request_seed(0, 0, 0), request_seed(0, 0, 0) == request_seed(0, 0, 1)
        (True, False)
    """
    identity = repr((run_seed, rollout, sample_id, turn)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=4).digest(), "big") >> 1
