"""Answers: what an engine returned is held against what it was asked for, before anybody believes it.

What only the engine itself can have got wrong ends the run with an :class:`EngineError`, which leaves a checkpoint:
the number and the order of the completions, ids outside of the vocabulary, more tokens than asked for,
log-probabilities that are none, weights that nobody pushed. What spoils one sample and may be the sample's own bad
luck costs that sample: its row is aborted, which is warned of and counted (``rollout/aborted``), and trains nothing:
log-probabilities that are not finite, and a finish reason that its tokens contradict. If that is so of several samples
and of more than a tenth of an answer, it is the engine.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from lightning_rl.generation.engine import Completion, Engine, EngineError, Request
from lightning_rl.generation.sampling import Sampling
from lightning_rl.rollout import Finish

ROUNDING = 1e-3  # nats by which the log-probability of a certain token may exceed 0
MAX_REFUSED = 0.1  # share of an answer; a single sample never is too many
SHOWN = 8  # token ids of a prompt in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What an engine was asked for at once, kept from whoever could edit it.

    Args:
        engine: that is asked.
        requests: as they are handed to it.
        logprobs: whether each token needs a log-probability.
        vocabulary: number of token ids that the policy knows; None if unknown.
        text: the whole text of a response, special tokens included, in which a stop string is looked for; None if there
            is no tokenizer.
    """

    engine: Engine
    requests: Sequence[Request]
    logprobs: bool
    vocabulary: int | None = None
    text: Callable[[Sequence[int]], str] | None = None
    _asked: Sequence[tuple[Any, ...]] = field(init=False)
    _samplings: Sequence[tuple[Sampling, Sampling]] = field(init=False)

    def __post_init__(self) -> None:
        """Remembers what was asked for."""
        object.__setattr__(self, "_asked", [_identity(request) for request in self.requests])
        different = {id(request.sampling): request.sampling for request in self.requests}
        object.__setattr__(self, "_samplings", [(sampling, copy.copy(sampling)) for sampling in different.values()])

    @property
    def name(self) -> str:
        """How messages call the engine."""
        return type(self.engine).__name__

    def check(self, given: Sequence[Completion]) -> list[Completion]:
        """The completions that may be believed; a sample that may not comes back as :attr:`Finish.ABORT`.

        Args:
            given: what the engine returned.

        Raises:
            EngineError: naming engine, sample, request and prompt, if the answer cannot be one to these requests.
        """
        self._check_requests()
        if not isinstance(given, Sequence) or len(given) != len(self.requests):
            got = f"{len(given)}" if isinstance(given, Sequence) else f"a {type(given).__name__}"
            raise EngineError(
                f"expected {len(self.requests)} completions from {self.name}, one for each request, got {got}: an "
                "engine answers every request once, in their order, and says ABORT for what it cannot"
            )
        for place, (request, completion) in enumerate(zip(self.requests, given, strict=True)):
            self._check_one(place, request, completion)
        self._check_logprobs(given)
        return self._abort(given, {**self._contradictions(given), **self._not_finite(given)})

    def _check_requests(self) -> None:
        edited = [place for place, asked in enumerate(self._asked) if _identity(self.requests[place]) != asked]
        if edited:
            raise EngineError(
                f"expected {self.name} to leave its requests alone, got edits of {self._where(edited[0])}"
            )
        for sampling, before in self._samplings:
            if sampling != before:
                raise EngineError(f"expected {self.name} to leave {before} of its requests alone, got {sampling}")

    def _check_one(self, place: int, request: Request, completion: Completion) -> None:
        if not isinstance(completion, Completion) or not isinstance(completion.finish, Finish):
            self._refuse(place, "a Completion with a Finish", repr(completion)[:100])
        if completion.sample_id not in (None, request.sample_id):
            self._refuse(
                place, f"the completion of sample {request.sample_id}", f"that of sample {completion.sample_id}"
            )
        ids, limit = completion.token_ids, request.sampling.max_new_tokens
        if len(ids) > limit:
            self._refuse(place, f"at most {limit} tokens (max_new_tokens)", f"{len(ids)}")
        if any(kind is bool or not issubclass(kind, Integral) for kind in set(map(type, ids))):
            self._refuse(place, "token ids that are whole numbers", f"{list(ids[:SHOWN])}")
        if ids and (min(ids) < 0 or (self.vocabulary is not None and max(ids) >= self.vocabulary)):
            outside = next(i for i in ids if i < 0 or (self.vocabulary is not None and i >= self.vocabulary))
            self._refuse(place, f"token ids in [0, {self.vocabulary or '...'}), the policy's vocabulary", f"{outside}")
        versions = {completion.version} if completion.versions is None else set(completion.versions)
        if unknown := versions - self.engine.pushed:
            held = f"the last of which is {self.engine.version}"
            self._refuse(place, f"tokens of weights that were pushed, {held}", f"version {min(unknown)}")

    def _check_logprobs(self, given: Sequence[Completion]) -> None:
        if not self.logprobs:
            return
        for place, completion in enumerate(given):
            scores, number = completion.logprobs, len(completion.token_ids)
            if scores is None or scores.shape != (number,) or not scores.is_floating_point():
                shape = "none" if scores is None else len(scores) if scores.dim() == 1 else list(scores.shape)
                got = shape if scores is None or scores.is_floating_point() else f"{scores.dtype}"
                self._refuse(place, f"a log-probability for each of {number} tokens", f"{got}")
        if (place := _first(given, lambda scores: ~(scores.isfinite() & (scores > ROUNDING)))) is not None:
            highest = float(_scores(given[place]).nan_to_num(posinf=0.0).max())
            self._refuse(place, "log-probabilities of at most 0", f"{highest:.4g}")

    def _not_finite(self, given: Sequence[Completion]) -> dict[int, str]:
        """Samples with a log-probability that is not finite, by their place."""
        if not self.logprobs or _first(given, torch.isfinite) is None:
            return {}
        bad = {}
        for place, completion in enumerate(given):
            scores = _scores(completion)
            if completion.finish is not Finish.ABORT and not bool(torch.isfinite(scores).all()):
                position = int((~torch.isfinite(scores)).nonzero()[0, 0])
                bad[place] = f"a log-probability of {float(scores[position])} at position {position}"
        return bad

    def _contradictions(self, given: Sequence[Completion]) -> dict[int, str]:
        """Samples whose finish reason is not that of their tokens, by their place."""
        said = {place: self._contradiction(self.requests[place], each) for place, each in enumerate(given)}
        return {place: what for place, what in said.items() if what}

    def _contradiction(self, request: Request, completion: Completion) -> str:
        ids, ends = completion.token_ids, request.eos_token_ids
        at_end, limit = bool(ids) and ids[-1] in ends, self.engine.max_length
        if completion.finish is Finish.ABORT:
            return ""
        if any(i in ids[:-1] for i in ends):
            return "tokens after the one that ends a response"
        if completion.finish is Finish.STOP:
            return (
                "" if at_end or self._stops(request, ids) else f"a stop without an id in {list(ends)} or a stop string"
            )
        if at_end:
            return f"an end for its length, but with the id {ids[-1]} that ends a response"
        full = len(ids) == request.sampling.max_new_tokens or self.engine.capabilities.cuts_short
        if full or (limit is not None and len(request.prefix_ids) + len(ids) >= limit):
            return ""
        return f"an end for its length after {len(ids)} of {request.sampling.max_new_tokens} tokens"

    def _stops(self, request: Request, ids: Sequence[int]) -> bool:
        """Whether a response holds a stop string, as far as that can be told."""
        stops = request.sampling.stop
        if not stops or self.text is None:
            return bool(stops)
        text = self.text(ids)
        return any(stop in text for stop in stops)

    def _abort(self, given: Sequence[Completion], bad: dict[int, str]) -> list[Completion]:
        """The completions with some aborted, unless they are too many."""
        if not bad:
            return list(given)
        place = min(bad)
        first = f"got {bad[place]} for {self._where(place)}"
        if len(bad) > max(1, MAX_REFUSED * len(given)):
            raise EngineError(
                f"expected samples from {self.name} that can be believed, {first}, and {len(bad)} of {len(given)} like "
                "it: look for the fault in the engine, its dtype first"
            )
        warnings.warn(
            f"{len(bad)} of {len(given)} samples from {self.name} are aborted and train nothing: {first}", stacklevel=3
        )
        return [_give_up(each) if place in bad else each for place, each in enumerate(given)]

    def _refuse(self, place: int, expected: str, got: str) -> None:
        raise EngineError(f"expected {expected} from {self.name}, got {got} for {self._where(place)}")

    def _where(self, place: int) -> str:
        """A sample, in words."""
        prefix, sample_id = self._asked[place][:2]
        shown = f"{list(prefix[:SHOWN])}" + (" ..." if len(prefix) > SHOWN else "")
        text = "" if self.text is None else f" {self.text(prefix)!r:.80}"
        return f"sample {sample_id} (request {place} of {len(self._asked)}, prompt {shown}{text})"


def _identity(request: Request) -> tuple[Any, ...]:
    return request.prefix_ids, request.sample_id, request.seed, request.turn


def _give_up(completion: Completion) -> Completion:
    scores = completion.logprobs
    return replace(completion, finish=Finish.ABORT, logprobs=None if scores is None else torch.zeros_like(scores))


def _scores(completion: Completion) -> Tensor:
    return torch.zeros(0) if completion.logprobs is None else completion.logprobs


def _first(given: Sequence[Completion], holds: Callable[[Tensor], Tensor]) -> int | None:
    """The first completion with a log-probability that is not as it should be."""
    if not given:
        return None
    fits = holds(torch.cat([_scores(completion) for completion in given]))
    if bool(fits.all()):
        return None
    ends = torch.tensor([len(completion.token_ids) for completion in given]).cumsum(0)
    return int(torch.searchsorted(ends, int((~fits).nonzero()[0, 0]), right=True))
