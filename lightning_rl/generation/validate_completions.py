"""Checks of completions against the requests that they answer.

A malformed completion (:mod:`.form`), a wrong number or order, ids outside the vocabulary, too many tokens, and
weights that were never pushed or are too old are an :class:`EngineError`, which ends the run after a checkpoint. A
single sample with an impossible log-probability or finish reason is aborted with a warning (``engine/aborted``) and
does not train; several, and more than a tenth of an answer, are an error. What is unlikely but possible is only a
warning: all samples aborted, or all tokens certain.
"""

import copy
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_rl.generation.completion_schema import SHOWN, FormError, check_form
from lightning_rl.generation.engine import Completion, Engine, EngineError, Request
from lightning_rl.generation.sampling_params import SamplingParams
from lightning_rl.rollout import ROUTES, FinishReason

ROUNDING = 1e-3  # nats by which rounding may lift the log-probability of a certain token above 0
MAX_REFUSED = 0.1  # share of an answer; a single faulty sample is always tolerated
IMPOSSIBLE = math.log(2.0**-149)  # log of the smallest positive float32, -103.3: no token is sampled at or below it
CERTAIN_TOKENS = 64  # sampled tokens above temperature 0 that are never all certain by chance
BELIEVABLE = "look for the fault in the engine, its dtype first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Requests sent to an engine in one call, with a copy of their contents, and the checks of its answer.

    Args:
        engine: Engine that answers.
        requests: Requests as passed to the engine.
        logprobs: True if each token needs a log-probability.
        vocabulary: Number of token ids of the policy; None if unknown.
        text: Function that decodes a response, special tokens included, to search it for stop strings; None without a
            tokenizer.
    """

    engine: Engine
    requests: Sequence[Request]
    logprobs: bool
    vocabulary: int | None = None
    text: Callable[[Sequence[int]], str] | None = None
    _asked: Sequence[tuple[Any, ...]] = field(init=False)
    _samplings: Sequence[tuple[SamplingParams, SamplingParams]] = field(init=False)
    _pinned: int = field(init=False)

    def __post_init__(self) -> None:
        """Store a copy of the requests and the engine's current version."""
        object.__setattr__(self, "_pinned", self.engine.version)
        object.__setattr__(self, "_asked", [_identity(request) for request in self.requests])
        different = {id(request.sampling): request.sampling for request in self.requests}
        object.__setattr__(self, "_samplings", [(sampling, copy.copy(sampling)) for sampling in different.values()])

    @property
    def name(self) -> str:
        """Name of the engine in messages."""
        return type(self.engine).__name__

    def check(self, given: Any) -> list[Completion]:
        """Return the completions, with faulty samples replaced by aborted ones (:attr:`FinishReason.ABORT`).

        Args:
            given: Return value of the engine.

        Raises:
            EngineError: If the answer does not fit the requests; names engine, sample, request and prompt.
        """
        formed, bad = self.examine(given)
        believed = self._abort(formed, bad)
        self._warn_of_nothing(formed)
        self._warn_of_certainty(believed)
        return believed

    def examine(self, given: Sequence[Completion]) -> tuple[list[Completion], dict[int, str]]:
        """Return the normalized completions, and the fault of each faulty sample by its index.

        Raises:
            EngineError: As :meth:`check`, except for too many faulty samples.
        """
        self._check_requests()
        formed = [self.check_alone(place, completion) for place, completion in enumerate(self._as_list(given))]
        self._check_extras(formed)
        self._check_positive(formed)
        return formed, {**self._contradictions(formed), **self._unbelievable(formed)}

    def check_alone(self, place: int, given: Any) -> Completion:
        """Return one completion in normalized form, after the checks that need no other completion.

        Raises:
            EngineError: As :meth:`check`.
        """
        completion = self._form(place, given)
        self._check_one(place, self.requests[place], completion)
        return completion

    def _as_list(self, given: Any) -> list[Any]:
        """Return the completions as a list of the right length; ``len`` of a foreign container is not trusted."""
        number, cure = len(self.requests), "answer every request once, in order, with ABORT for"
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
            self._refuse_answer(f"a {type(given).__name__}", f"return a list; {cure} failed ones")
        listed = list(given) if isinstance(given, list | tuple) else list(islice(given, number + 1))
        if len(listed) != number:
            self._refuse_answer(f"{len(listed)}", f"{cure} failed ones")
        return listed

    def _refuse_answer(self, got: str, cure: str) -> NoReturn:
        expected = f"{len(self.requests)} completions from {self.name}, one for each request"
        raise EngineError(f"expected {expected}, got {got}: {cure}")

    def _form(self, place: int, given: Any) -> Completion:
        length = len(self._asked[place][0])
        try:
            return check_form(given, logprobs=self.logprobs, prompt_length=length, extras=self.engine.extras)
        except FormError as wrong:
            self._refuse(place, wrong.expected, wrong.got, wrong.cure)

    def _check_requests(self) -> None:
        edited = [place for place, asked in enumerate(self._asked) if _identity(self.requests[place]) != asked]
        if edited:
            raise EngineError(f"expected {self.name} to leave its requests alone, got edits of {self.where(edited[0])}")
        for sampling, before in self._samplings:
            if sampling != before:
                raise EngineError(f"expected {self.name} to leave {before} of its requests alone, got {sampling}")

    def _check_one(self, place: int, request: Request, completion: Completion) -> None:
        if completion.sample_id not in (None, request.sample_id):
            expected, got = f"the completion of sample {request.sample_id}", f"that of sample {completion.sample_id}"
            self._refuse(place, expected, got, "put the completions into the order of the requests")
        ids, limit = completion.token_ids, request.sampling.max_new_tokens
        if len(ids) > limit:
            cure = "end a response there, with FinishReason.LENGTH"
            self._refuse(place, f"at most {limit} tokens (max_new_tokens)", f"{len(ids)}", cure)
        if ids and (min(ids) < 0 or (self.vocabulary is not None and max(ids) >= self.vocabulary)):
            outside = next(i for i in ids if i < 0 or (self.vocabulary is not None and i >= self.vocabulary))
            expected = f"token ids in [0, {self.vocabulary or '...'}), the policy's vocabulary"
            self._refuse(place, expected, f"{outside}", "sample no other ids, such as those of a padded head")
        self._check_versions(place, {completion.version, *(completion.versions or ())})

    def _check_versions(self, place: int, versions: set[int]) -> None:
        held = f"the last of which is {self.engine.version}"
        if unknown := versions - self.engine.pushed:
            cure = "set version=self.version, which load_weights sets"
            self._refuse(place, f"tokens of weights that were pushed, {held}", f"version {min(unknown)}", cure)
        if min(versions) < self._pinned:
            expected = f"tokens of version {self._pinned}, which it had at the request, or later"
            cure = "finish loading in every copy before load_weights returns, and read the version before a request"
            self._refuse(place, expected, f"version {min(versions)}", cure)

    def _check_extras(self, given: Sequence[Completion]) -> None:
        """Check that each extra has the same shape and dtype at every token of every sample."""
        if not self.engine.extras:
            return
        forms: dict[str, tuple[Any, ...]] = {}
        for place, completion in enumerate(given):
            for name, extra in _extras_of(completion, self.engine.extras):
                form = (extra.dtype, list(extra.shape[1:]))
                if form != forms.setdefault(name, form):
                    cure = "record the same of every token, in every answer"
                    self._refuse(place, f"{name} of {_say(forms[name])} at each token", _say(form), cure)

    def _check_positive(self, given: Sequence[Completion]) -> None:
        if not self.logprobs:
            return
        if (place := _first(given, lambda scores: ~(scores.isfinite() & (scores > ROUNDING)))) is not None:
            highest = float(_scores(given[place]).nan_to_num(posinf=0.0).max())
            cure = "return the log_softmax, neither logits nor probabilities"
            self._refuse(place, "log-probabilities of at most 0", f"{highest:.4g}", cure)

    def _unbelievable(self, given: Sequence[Completion]) -> dict[int, str]:
        """Return the samples with a log-probability that is not finite or that no token is sampled at, by index."""
        if not self.logprobs or _first(given, _drawable) is None:
            return {}
        bad = {}
        for place, completion in enumerate(given):
            wrong = ~_drawable(_scores(completion))
            if completion.finish is not FinishReason.ABORT and bool(wrong.any()):
                position = int(wrong.nonzero()[0, 0])
                value = float(_scores(completion)[position])
                why = ", at which no token is sampled" if math.isfinite(value) else ""
                bad[place] = f"a log-probability of {value:.6g} at position {position}{why}"
        return bad

    def _warn_of_nothing(self, given: Sequence[Completion]) -> None:
        """Warn if the engine aborted every sample, which leaves nothing to train on."""
        if given and all(completion.finish is FinishReason.ABORT for completion in given):
            warnings.warn(
                f"{self.name} aborted every requested sample (FinishReason.ABORT), so nothing trains: look at its log, "
                "and check that prompts fit its context length",
                stacklevel=3,
            )

    def _warn_of_certainty(self, given: Sequence[Completion]) -> None:
        """Warn if all log-probabilities are exactly 0, as if the engine filled them in.

        An exact 0 is a probability that rounds to 1 in float32. Apart from a vocabulary of one token, greedy sampling
        and filters, only a collapsed policy has such log-probabilities.
        """
        if not self.logprobs or self.vocabulary == 1:
            return
        drawn = [
            completion
            for completion, request in zip(given, self.requests, strict=True)
            if completion.finish is not FinishReason.ABORT
            and request.sampling.temperature > 0
            and not request.sampling.filters
        ]
        tokens = sum(len(completion.token_ids) for completion in drawn)
        if tokens >= CERTAIN_TOKENS and not any(bool(_scores(completion).any()) for completion in drawn):
            warnings.warn(
                f"every log-probability from {self.name} is exactly 0, as if each of its tokens had been certain at a "
                "temperature above 0: return the log-probabilities that the tokens were sampled with instead of zeros; "
                "if they are correct, the policy has collapsed",
                stacklevel=3,
            )

    def _contradictions(self, given: Sequence[Completion]) -> dict[int, str]:
        """Return the samples whose finish reason contradicts their tokens, by index."""
        said = {place: self._contradiction(self.requests[place], each) for place, each in enumerate(given)}
        return {place: what for place, what in said.items() if what}

    def _contradiction(self, request: Request, completion: Completion) -> str:
        ids, ends = completion.token_ids, request.eos_token_ids
        at_end, limit = bool(ids) and ids[-1] in ends, self.engine.max_length
        if completion.finish is FinishReason.ABORT:
            return ""
        if not set(ends).isdisjoint(ids[:-1]):
            return "tokens after an EOS id"
        if completion.finish is FinishReason.STOP:
            return (
                ""
                if at_end or self._stops(request, ids)
                else f"finish STOP without an id in {list(ends)} or a stop string"
            )
        if at_end:
            return f"finish LENGTH although the last id, {ids[-1]}, is an EOS id"
        full = len(ids) == request.sampling.max_new_tokens or self.engine.capabilities.cuts_short
        if full or (limit is not None and len(request.prefix_ids) + len(ids) >= limit):
            return ""
        return f"finish LENGTH after {len(ids)} of {request.sampling.max_new_tokens} tokens"

    def _stops(self, request: Request, ids: Sequence[int]) -> bool:
        """Return True if the response contains a stop string, or if that cannot be checked without a tokenizer."""
        stops = request.sampling.stop
        if not stops or self.text is None:
            return bool(stops)
        text = self.text(ids)
        return any(stop in text for stop in stops)

    def _abort(self, given: Sequence[Completion], bad: dict[int, str]) -> list[Completion]:
        if not bad:
            return list(given)
        place = min(bad)
        judge(len(bad), len(given), f"got {bad[place]} for {self.where(place)}", self.name)
        return [_give_up(each) if place in bad else each for place, each in enumerate(given)]

    def _refuse(self, place: int, expected: str, got: str, cure: str) -> NoReturn:
        raise EngineError(f"expected {expected} from {self.name}, got {got} for {self.where(place)}: {cure}")

    def where(self, place: int) -> str:
        """Return a description of a sample for messages."""
        prefix, sample_id, _, turn = self._asked[place]
        shown = f"{list(prefix[:SHOWN])}" + (" ..." if len(prefix) > SHOWN else "")
        text = "" if self.text is None else f" {self.text(prefix)!r:.80}"
        which = f"turn {turn}" if turn else f"request {place} of {len(self._asked)}"
        return f"sample {sample_id} ({which}, prompt {shown}{text})"


class TurnAnswers:
    """Checks of requests that arrive one after the other, as the turns of conversations do. Thread-safe.

    An engine's fault raises at once. The share of faulty samples is judged in :meth:`close`, so that it does not
    depend on the order of the turns.

    Args:
        engine: Engine that answers.
        logprobs: True if each token needs a log-probability.
        vocabulary: Number of token ids of the policy; None if unknown.
        text: Function that decodes a response, as in :class:`Answers`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        logprobs: bool,
        vocabulary: int | None = None,
        text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._of = partial(Answers, engine=engine, logprobs=logprobs, vocabulary=vocabulary, text=text)
        self._name = type(engine).__name__
        self._lock = threading.Lock()
        self._open: dict[int, Answers] = {}  # by id() of the request
        self._given = 0
        self._checked: dict[int, tuple[Request, Completion]] = {}  # the request is kept so that its id stays unique
        self._bad: list[tuple[int, int, str]] = []  # sample, turn, fault

    def ask(self, requests: Sequence[Request]) -> None:
        """Store requests before the engine receives them."""
        with self._lock:
            self._open |= {id(request): self._of(requests=(request,)) for request in requests}

    def check(self, request: Request, completion: Completion) -> Completion:
        """Return the completion, or an aborted one if it is faulty.

        Raises:
            EngineError: If it does not fit the request; names engine, sample, turn and prompt.
        """
        with self._lock:
            answers = self._open.pop(id(request), None)
        if answers is None:
            raise EngineError(
                f"expected {self._name} to answer each request once, got a second answer to sample "
                f"{request.sample_id}, turn {request.turn}"
            )
        (formed,), bad = answers.examine([completion])
        formed = _give_up(formed) if bad else formed
        with self._lock:
            self._given += 1
            self._checked[id(request)] = request, formed
            if bad:
                self._bad.append((request.sample_id, request.turn, f"got {bad[0]} for {answers.where(0)}"))
        return formed

    def answer_to(self, request: Request) -> Completion | None:
        """Return the checked completion of a request, or None if there is none yet."""
        return self._checked.get(id(request), (request, None))[1]

    def close(self) -> None:
        """Warn of aborted samples.

        Raises:
            EngineError: If they are too many.
        """
        if self._bad:
            judge(len(self._bad), self._given, min(self._bad)[-1], self._name)


def judge(bad: int, given: int, first: str, engine: str) -> None:
    """Warn of faulty samples.

    Raises:
        EngineError: If they are more than one and more than :data:`MAX_REFUSED` of all.
    """
    if bad > max(1, MAX_REFUSED * given):
        raise EngineError(
            f"expected valid samples from {engine}, {first}, and {bad} of {given} samples are faulty: {BELIEVABLE}"
        )
    warnings.warn(f"{bad} of {given} samples from {engine} are aborted and do not train: {first}", stacklevel=4)


def _identity(request: Request) -> tuple[Any, ...]:
    return request.prefix_ids, request.sample_id, request.seed, request.turn


def _give_up(completion: Completion) -> Completion:
    scores = completion.logprobs
    return replace(completion, finish=FinishReason.ABORT, logprobs=None if scores is None else torch.zeros_like(scores))


def _scores(completion: Completion) -> Tensor:
    return torch.zeros(0) if completion.logprobs is None else completion.logprobs


def _drawable(scores: Tensor) -> Tensor:
    """Return True for each log-probability at which a token can have been sampled."""
    return scores.isfinite() & (scores > IMPOSSIBLE)


def _extras_of(completion: Completion, names: frozenset[str]) -> list[tuple[str, Tensor]]:
    recorded = [(name, completion.token_extras[name]) for name in sorted(names)]
    return recorded + [(f"{name} of the prompt", completion.prompt_extras[name]) for name in sorted(names & {ROUTES})]


def _say(form: tuple[Any, ...]) -> str:
    return f"{str(form[0]).removeprefix('torch.')} {form[1]}"


def _first(given: Sequence[Completion], holds: Callable[[Tensor], Tensor]) -> int | None:
    """Return the index of the first completion with a log-probability that violates the condition, or None."""
    if not given:
        return None
    fits = holds(torch.cat([_scores(completion) for completion in given]))
    if bool(fits.all()):
        return None
    ends = torch.tensor([len(completion.token_ids) for completion in given]).cumsum(0)
    return int(torch.searchsorted(ends, int((~fits).nonzero()[0, 0]), right=True))
