"""Answers: what an engine returned is held against what it was asked for, before anybody believes it.

What only the engine itself can have got wrong ends the run with an :class:`EngineError`, which leaves a checkpoint:
what a completion is made of (:mod:`.form`), the number and the order of the completions, ids outside of the vocabulary,
more tokens than asked for, weights that nobody pushed or that are older than those it had when it was asked. What
spoils one sample and may be the sample's own bad luck costs that sample: its row is aborted, which is warned of and
counted (``engine/aborted``), and trains nothing: log-probabilities that are not finite or that no token can have been
drawn at, and a finish reason that its tokens contradict. If that is so of several samples and of more than a tenth of
an answer, it is the engine. What is unlikely and may be true is said and believed: an answer that is aborted whole, and
tokens that all were certain.
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

from lightning_rl.generation.engine import Completion, Engine, EngineError, Request
from lightning_rl.generation.form import SHOWN, FormError, check_form
from lightning_rl.generation.sampling import Sampling
from lightning_rl.rollout import ROUTES, Finish

ROUNDING = 1e-3  # nats by which the log-probability of a certain token may exceed 0
MAX_REFUSED = 0.1  # share of an answer; a single sample never is too many
IMPOSSIBLE = math.log(2.0**-149)  # of a probability that float32 does not hold: at -103.3 and below nobody draws
CERTAIN_TOKENS = 64  # drawn at a temperature above 0: so many in a row are never all certain by chance
BELIEVABLE = "look for the fault in the engine, its dtype first"


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
    _pinned: int = field(init=False)

    def __post_init__(self) -> None:
        """Remembers what was asked for, and of which weights."""
        object.__setattr__(self, "_pinned", self.engine.version)
        object.__setattr__(self, "_asked", [_identity(request) for request in self.requests])
        different = {id(request.sampling): request.sampling for request in self.requests}
        object.__setattr__(self, "_samplings", [(sampling, copy.copy(sampling)) for sampling in different.values()])

    @property
    def name(self) -> str:
        """How messages call the engine."""
        return type(self.engine).__name__

    def check(self, given: Any) -> list[Completion]:
        """The completions that may be believed; a sample that may not comes back as :attr:`Finish.ABORT`.

        Args:
            given: what the engine returned.

        Raises:
            EngineError: naming engine, sample, request and prompt, if the answer cannot be one to these requests.
        """
        formed, bad = self.examine(given)
        believed = self._abort(formed, bad)
        self._warn_of_nothing(formed)
        self._warn_of_certainty(believed)
        return believed

    def examine(self, given: Sequence[Completion]) -> tuple[list[Completion], dict[int, str]]:
        """The completions in their proper form, and what is wrong with those that may not be believed, by their place.

        Raises:
            EngineError: as :meth:`check` does, unless it is only that they are too many.
        """
        self._check_requests()
        formed = [self.check_alone(place, completion) for place, completion in enumerate(self._as_list(given))]
        self._check_extras(formed)
        self._check_positive(formed)
        return formed, {**self._contradictions(formed), **self._unbelievable(formed)}

    def check_alone(self, place: int, given: Any) -> Completion:
        """One completion in its proper form, as far as it can be told without the others.

        Raises:
            EngineError: as :meth:`check` does.
        """
        completion = self._form(place, given)
        self._check_one(place, self.requests[place], completion)
        return completion

    def _as_list(self, given: Any) -> list[Any]:
        """The completions, as many as there are requests, whatever their container says of its length."""
        number, cure = len(self.requests), "an engine answers every request once, in their order, and says ABORT for"
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
            self._refuse_answer(f"a {type(given).__name__}", f"return a list; {cure} what it cannot")
        listed = list(given) if isinstance(given, list | tuple) else list(islice(given, number + 1))
        if len(listed) != number:
            self._refuse_answer(f"{len(listed)}", f"{cure} what it cannot")
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
            cure = "end a response there, with Finish.LENGTH"
            self._refuse(place, f"at most {limit} tokens (max_new_tokens)", f"{len(ids)}", cure)
        if ids and (min(ids) < 0 or (self.vocabulary is not None and max(ids) >= self.vocabulary)):
            outside = next(i for i in ids if i < 0 or (self.vocabulary is not None and i >= self.vocabulary))
            expected = f"token ids in [0, {self.vocabulary or '...'}), the policy's vocabulary"
            self._refuse(place, expected, f"{outside}", "draw no other, such as those of a padded head")
        self._check_versions(place, {completion.version, *(completion.versions or ())})

    def _check_versions(self, place: int, versions: set[int]) -> None:
        held = f"the last of which is {self.engine.version}"
        if unknown := versions - self.engine.pushed:
            cure = "give the version that load_weights brought, self.version"
            self._refuse(place, f"tokens of weights that were pushed, {held}", f"version {min(unknown)}", cure)
        if min(versions) < self._pinned:
            expected = f"tokens of version {self._pinned}, which it had when it was asked, or later"
            cure = "load the weights before load_weights returns, in every copy, and note the version before a request"
            self._refuse(place, expected, f"version {min(versions)}", cure)

    def _check_extras(self, given: Sequence[Completion]) -> None:
        """What is recorded has the same shape and type at every token of every sample."""
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
            cure = "return log-probabilities, of a log_softmax, and neither logits nor probabilities"
            self._refuse(place, "log-probabilities of at most 0", f"{highest:.4g}", cure)

    def _unbelievable(self, given: Sequence[Completion]) -> dict[int, str]:
        """Samples with a log-probability that is not finite, or that no token can be drawn at, by their place."""
        if not self.logprobs or _first(given, _drawable) is None:
            return {}
        bad = {}
        for place, completion in enumerate(given):
            wrong = ~_drawable(_scores(completion))
            if completion.finish is not Finish.ABORT and bool(wrong.any()):
                position = int(wrong.nonzero()[0, 0])
                value = float(_scores(completion)[position])
                why = ", at which nothing is drawn" if math.isfinite(value) else ""
                bad[place] = f"a log-probability of {value:.6g} at position {position}{why}"
        return bad

    def _warn_of_nothing(self, given: Sequence[Completion]) -> None:
        """An engine that gives up everything: what is trained by that is nothing."""
        if given and all(completion.finish is Finish.ABORT for completion in given):
            warnings.warn(
                f"{self.name} gave up every sample that it was asked for (Finish.ABORT), of which nothing is learnt: "
                "look at its own log, and whether prompts fit it",
                stacklevel=3,
            )

    def _warn_of_certainty(self, given: Sequence[Completion]) -> None:
        """Log-probabilities that all are exactly 0, as of an engine that fills them in.

        Exactly 0 is a probability that rounds to 1 in float32. One token in the vocabulary, a temperature of 0 and
        filters leave nothing else; otherwise only a policy says so that has collapsed altogether.
        """
        if not self.logprobs or self.vocabulary == 1:
            return
        drawn = [
            completion
            for completion, request in zip(given, self.requests, strict=True)
            if completion.finish is not Finish.ABORT
            and request.sampling.temperature > 0
            and not request.sampling.filters
        ]
        tokens = sum(len(completion.token_ids) for completion in drawn)
        if tokens >= CERTAIN_TOKENS and not any(bool(_scores(completion).any()) for completion in drawn):
            warnings.warn(
                f"every log-probability from {self.name} is exactly 0, as if each of its tokens had been certain at a "
                "temperature above 0: return those that the tokens were drawn at, and no zeros in their place; if it "
                "is true, the policy has collapsed and explores no more",
                stacklevel=3,
            )

    def _contradictions(self, given: Sequence[Completion]) -> dict[int, str]:
        """Samples whose finish reason is not that of their tokens, by their place."""
        said = {place: self._contradiction(self.requests[place], each) for place, each in enumerate(given)}
        return {place: what for place, what in said.items() if what}

    def _contradiction(self, request: Request, completion: Completion) -> str:
        ids, ends = completion.token_ids, request.eos_token_ids
        at_end, limit = bool(ids) and ids[-1] in ends, self.engine.max_length
        if completion.finish is Finish.ABORT:
            return ""
        if not set(ends).isdisjoint(ids[:-1]):
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
        judge(len(bad), len(given), f"got {bad[place]} for {self.where(place)}", self.name)
        return [_give_up(each) if place in bad else each for place, each in enumerate(given)]

    def _refuse(self, place: int, expected: str, got: str, cure: str) -> NoReturn:
        raise EngineError(f"expected {expected} from {self.name}, got {got} for {self.where(place)}: {cure}")

    def where(self, place: int) -> str:
        """A sample, in words."""
        prefix, sample_id, _, turn = self._asked[place]
        shown = f"{list(prefix[:SHOWN])}" + (" ..." if len(prefix) > SHOWN else "")
        text = "" if self.text is None else f" {self.text(prefix)!r:.80}"
        which = f"turn {turn}" if turn else f"request {place} of {len(self._asked)}"
        return f"sample {sample_id} ({which}, prompt {shown}{text})"


class TurnAnswers:
    """The same for requests that come up one after the other, as the turns of conversations do.

    What only the engine can have got wrong is an error at once. How many samples are too many is told at the end, so
    that it depends on what was drawn and not on the order. Threads may share it.

    Args:
        engine: that is asked.
        logprobs: whether each token needs a log-probability.
        vocabulary: number of token ids that the policy knows; None if unknown.
        text: as for :class:`Answers`.
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
        self._open: dict[int, Answers] = {}  # by the identity of the request
        self._given = 0
        self._checked: dict[int, tuple[Request, Completion]] = {}  # the same; requests are kept with their identity
        self._bad: list[tuple[int, int, str]] = []  # sample, turn, and what is wrong

    def ask(self, requests: Sequence[Request]) -> None:
        """Remembers what is asked for, before the engine sees it."""
        with self._lock:
            self._open |= {id(request): self._of(requests=(request,)) for request in requests}

    def check(self, request: Request, completion: Completion) -> Completion:
        """The completion if it may be believed, otherwise one that is aborted.

        Raises:
            EngineError: naming engine, sample, turn and prompt, if it cannot be one to this request.
        """
        with self._lock:
            answers = self._open.pop(id(request), None)
        if answers is None:
            raise EngineError(
                f"expected {self._name} to answer each request once, got a further answer to sample "
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
        """What was given for a request, whatever has become of it since; None if nothing was."""
        return self._checked.get(id(request), (request, None))[1]

    def close(self) -> None:
        """Warns of samples that were aborted.

        Raises:
            EngineError: if they are too many.
        """
        if self._bad:
            judge(len(self._bad), self._given, min(self._bad)[-1], self._name)


def judge(bad: int, given: int, first: str, engine: str) -> None:
    """Warns of samples that may not be believed.

    Raises:
        EngineError: if they are too many to be the samples' own bad luck.
    """
    if bad > max(1, MAX_REFUSED * given):
        raise EngineError(
            f"expected samples from {engine} that can be believed, {first}, and {bad} of {given} like it: {BELIEVABLE}"
        )
    warnings.warn(f"{bad} of {given} samples from {engine} are aborted and train nothing: {first}", stacklevel=4)


def _identity(request: Request) -> tuple[Any, ...]:
    return request.prefix_ids, request.sample_id, request.seed, request.turn


def _give_up(completion: Completion) -> Completion:
    scores = completion.logprobs
    return replace(completion, finish=Finish.ABORT, logprobs=None if scores is None else torch.zeros_like(scores))


def _scores(completion: Completion) -> Tensor:
    return torch.zeros(0) if completion.logprobs is None else completion.logprobs


def _drawable(scores: Tensor) -> Tensor:
    """Whether tokens with these log-probabilities can have been drawn."""
    return scores.isfinite() & (scores > IMPOSSIBLE)


def _extras_of(completion: Completion, names: frozenset[str]) -> list[tuple[str, Tensor]]:
    """What an engine was asked to record of the tokens of a sample, and of its prompt where it has to."""
    recorded = [(name, completion.token_extras[name]) for name in sorted(names)]
    return recorded + [(f"{name} of the prompt", completion.prompt_extras[name]) for name in sorted(names & {ROUTES})]


def _say(form: tuple[Any, ...]) -> str:
    return f"{str(form[0]).removeprefix('torch.')} {form[1]}"


def _first(given: Sequence[Completion], holds: Callable[[Tensor], Tensor]) -> int | None:
    """The first completion with a log-probability that is not as it should be."""
    if not given:
        return None
    fits = holds(torch.cat([_scores(completion) for completion in given]))
    if bool(fits.all()):
        return None
    ends = torch.tensor([len(completion.token_ids) for completion in given]).cumsum(0)
    return int(torch.searchsorted(ends, int((~fits).nonzero()[0, 0]), right=True))
