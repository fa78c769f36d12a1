"""Checks of completions against the requests that they answer.

A malformed completion, a wrong number or order, ids outside the vocabulary, too many tokens, and weights that were
never pushed or are too old are an :class:`EngineError`, which ends the run after a checkpoint. A single sample with an
impossible log-probability or finish reason is aborted with a warning (``engine/aborted``) and does not train; several,
and more than a tenth of an answer, are an error. What is unlikely but possible is only a warning: all samples aborted,
or all tokens certain.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_rl.generation.engine import Completion, Engine, EngineError, Request
from lightning_rl.rollout import ROUTES, FinishReason

ROUNDING = 1e-3  # nats by which rounding may lift the log-probability of a certain token above 0
MAX_REFUSED = 0.1  # share of an answer; a single faulty sample is always tolerated
IMPOSSIBLE = math.log(2.0**-149)  # log of the smallest positive float32, -103.3: no token is sampled at or below it
CERTAIN_TOKENS = 64  # sampled tokens above temperature 0 that are never all certain by chance
SHOWN = 8  # token ids in a message


class Answers:
    """Requests sent to an engine in one call, and the checks of its answer.

    Args:
        engine: Engine that answers.
        requests: Requests as passed to the engine.
        logprobs: True if each token needs a log-probability.
        vocabulary: Number of token ids of the policy; None if unknown.
        text: Function that decodes a response, special tokens included, to search it for stop strings; None without a
            tokenizer.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        *,
        logprobs: bool,
        vocabulary: int | None = None,
        text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.engine, self.requests, self.logprobs = engine, requests, logprobs
        self.vocabulary, self.text = vocabulary, text
        self.name, self.oldest = type(engine).__name__, engine.version  # of the engine when it was asked

    def check(self, given: Sequence[Completion]) -> list[Completion]:
        """Return the completions, with faulty samples replaced by aborted ones (:attr:`FinishReason.ABORT`).

        Raises:
            EngineError: If the answer does not fit the requests; names engine, sample, request and prompt.
        """
        checked, faults = self.examine(given)
        if faults:
            first = min(faults)
            judge(len(faults), len(checked), f"got {faults[first]} for {self.where(first)}", self.name)
        believed = [_give_up(each) if place in faults else each for place, each in enumerate(checked)]
        self._warn_of_nothing(checked)
        self._warn_of_certainty(believed)
        return believed

    def examine(self, given: Sequence[Completion]) -> tuple[list[Completion], dict[int, str]]:
        """Return the checked completions, and the fault of each faulty sample by its index.

        Raises:
            EngineError: As :meth:`check`, except for too many faulty samples.
        """
        if not isinstance(given, list | tuple) or len(given) != len(self.requests):
            got = len(given) if isinstance(given, list | tuple) else f"a {type(given).__name__}"
            raise EngineError(
                f"expected {len(self.requests)} completions from {self.name}, one for each request, got {got}: return "
                "a list that answers every request once, in order, with ABORT for failed ones"
            )
        checked = [self._check_alone(place, completion) for place, completion in enumerate(given)]
        possible = self._are_possible(checked)
        for place, completion in enumerate(() if possible else checked):
            self._check_positive(place, completion.logprobs)
        faults = {
            place: (not possible and self._impossible(completion.logprobs))
            or self._contradiction(self.requests[place], completion)
            for place, completion in enumerate(checked)
            if completion.finish is not FinishReason.ABORT
        }
        return checked, {place: fault for place, fault in faults.items() if fault}

    def _check_alone(self, place: int, given: Completion) -> Completion:
        """Return one completion, after the checks that need no other one."""
        request = self.requests[place]
        if not isinstance(given, Completion) or not isinstance(given.finish, FinishReason):
            cure = "return Completion(token_ids=, logprobs=, finish=FinishReason.STOP, version=self.version)"
            self._refuse(place, "a Completion with a FinishReason", f"{given!r:.100}", cure)
        if given.sample_id not in (None, request.sample_id):
            expected, got = f"the completion of sample {request.sample_id}", f"that of sample {given.sample_id}"
            self._refuse(place, expected, got, "put the completions into the order of the requests")
        self._check_ids(place, request, given.token_ids)
        self._check_versions(place, {given.version, *(given.versions or ())})
        self._check_extras(place, given)
        if self.logprobs and given.logprobs is None and given.finish is FinishReason.ABORT:
            given = replace(given, logprobs=torch.zeros(len(given.token_ids)))
        if self.logprobs:
            self._check_logprobs(place, given.logprobs, len(given.token_ids))
        return given

    def _check_ids(self, place: int, request: Request, ids: tuple[int, ...]) -> None:
        if not isinstance(ids, tuple) or not set(map(type, ids)) <= {int}:
            cure = "return the ids of the response, such as tuple(tensor.tolist())"
            self._refuse(place, "token ids as a tuple of ints", f"{ids!r:.100}", cure)
        if len(ids) > (limit := request.sampling.max_new_tokens):
            cure = "end a response there, with FinishReason.LENGTH"
            self._refuse(place, f"at most {limit} tokens (max_new_tokens)", str(len(ids)), cure)
        top = math.inf if self.vocabulary is None else self.vocabulary
        if ids and not (min(ids) >= 0 and max(ids) < top):
            outside = next(token for token in ids if not 0 <= token < top)
            expected = f"token ids in [0, {self.vocabulary or '...'}), the policy's vocabulary"
            self._refuse(place, expected, str(outside), "sample no other ids, such as those of a padded head")

    def _check_versions(self, place: int, versions: set[int]) -> None:
        for version in versions - self.engine.pushed:
            held = f"tokens of weights that were pushed, the last of which is {self.engine.version}"
            self._refuse(place, held, f"version {version}", "set version=self.version, which load_weights sets")
        if min(versions) < self.oldest:
            expected = f"tokens of version {self.oldest}, which it had at the request, or later"
            cure = "finish loading in every copy before load_weights returns, and read the version before a request"
            self._refuse(place, expected, f"version {min(versions)}", cure)

    def _check_logprobs(self, place: int, scores: Tensor | None, number: int) -> None:
        got = "none" if scores is None else f"a {type(scores).__name__}"
        if isinstance(scores, Tensor):
            sound = scores.dtype in (torch.float32, torch.float64) and not scores.requires_grad
            got = "" if sound and scores.shape == (number,) else _describe(scores)
        if scores is None or got:
            cure = f"return float32 of shape [{number}], such as logits.float().log_softmax(-1) under torch.no_grad()"
            self._refuse(place, f"a log-probability for each of {number} tokens", got, cure)

    def _are_possible(self, given: Sequence[Completion]) -> bool:
        """Return True if sampled tokens may have all log-probabilities, which are compared at once."""
        scores = [each.logprobs for each in given if self.logprobs and each.logprobs is not None and each.token_ids]
        if not scores:
            return True
        low, high = torch.cat(scores).aminmax()
        return bool((low > IMPOSSIBLE) & (high <= ROUNDING))  # False for NaN

    def _check_positive(self, place: int, scores: Tensor | None) -> None:
        positive = () if scores is None else scores[scores.isfinite() & (scores > ROUNDING)].tolist()
        if self.logprobs and positive:
            cure = "return the log_softmax, neither logits nor probabilities"
            self._refuse(place, "log-probabilities of at most 0", f"{max(positive):.4g}", cure)

    def _check_extras(self, place: int, given: Completion) -> None:
        """Check that the response has an entry of each extra for every token, and the prompt one of its routes."""
        names, prompt_length = self.engine.extras, len(self.requests[place].prefix_ids)
        fields = [("token_extras", name, len(given.token_ids)) for name in sorted(names)]
        fields += [("prompt_extras", name, prompt_length) for name in sorted(names & {ROUTES})]
        for where, name, length in fields:
            extra = getattr(given, where).get(name)
            got = "nothing" if extra is None else str(len(extra))
            if got != str(length):
                cure = f"put it into {where}, an entry for each token along its first axis"
                self._refuse(place, f"{name} of each of {length} tokens", got, cure)

    def _impossible(self, scores: Tensor | None) -> str:
        """Describe the first log-probability that is not finite, or at which no token is sampled."""
        if scores is None or not self.logprobs:
            return ""
        drawable = scores.isfinite() & (scores > IMPOSSIBLE)
        if bool(drawable.all()):
            return ""
        position = int((~drawable).nonzero()[0, 0])
        value = float(scores[position])
        why = ", at which no token is sampled" if math.isfinite(value) else ""
        return f"a log-probability of {value:.6g} at position {position}{why}"

    def _contradiction(self, request: Request, completion: Completion) -> str:
        """Describe a finish reason that contradicts the tokens."""
        ids, ends = completion.token_ids, request.eos_token_ids
        at_end = bool(ids) and ids[-1] in ends
        if not set(ends).isdisjoint(ids[:-1]):
            return "tokens after an EOS id"
        if completion.finish is FinishReason.STOP:
            stopped = at_end or self._stops(request, ids)
            return "" if stopped else f"finish STOP without an id in {list(ends)} or a stop string"
        if at_end:
            return f"finish LENGTH although the last id, {ids[-1]}, is an EOS id"
        limit = math.inf if self.engine.max_length is None else self.engine.max_length
        full = len(ids) == request.sampling.max_new_tokens or len(request.prefix_ids) + len(ids) >= limit
        if full or self.engine.capabilities.cuts_short:
            return ""
        return f"finish LENGTH after {len(ids)} of {request.sampling.max_new_tokens} tokens"

    def _stops(self, request: Request, ids: Sequence[int]) -> bool:
        """Return True if the response contains a stop string, or if that cannot be checked without a tokenizer."""
        stops = request.sampling.stop
        if not stops or self.text is None:
            return bool(stops)
        text = self.text(ids)
        return any(stop in text for stop in stops)

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
            completion.logprobs
            for completion, request in zip(given, self.requests, strict=True)
            if completion.finish is not FinishReason.ABORT
            and completion.logprobs is not None
            and request.sampling.temperature > 0
            and not request.sampling.filters
        ]
        if sum(map(len, drawn)) >= CERTAIN_TOKENS and not any(bool(scores.any()) for scores in drawn):
            warnings.warn(
                f"every log-probability from {self.name} is exactly 0, as if each of its tokens had been certain at a "
                "temperature above 0: return the log-probabilities that the tokens were sampled with instead of zeros; "
                "if they are correct, the policy has collapsed",
                stacklevel=3,
            )

    def _refuse(self, place: int, expected: str, got: str, cure: str) -> NoReturn:
        raise EngineError(f"expected {expected} from {self.name}, got {got} for {self.where(place)}: {cure}")

    def where(self, place: int) -> str:
        """Return a description of a sample for messages."""
        request = self.requests[place]
        ids = request.prefix_ids
        shown = f"{list(ids[:SHOWN])}" + (" ..." if len(ids) > SHOWN else "")
        text = "" if self.text is None else f" {self.text(ids)!r:.80}"
        which = f"turn {request.turn}" if request.turn else f"request {place} of {len(self.requests)}"
        return f"sample {request.sample_id} ({which}, prompt {shown}{text})"


class TurnAnswers:
    """Checks of requests that arrive one after the other, as the turns of conversations do. Thread-safe.

    An engine's fault raises at once. The share of faulty samples is judged in :meth:`close`, so that it does not
    depend on the order of the turns.

    Args:
        engine: Engine that answers.
        options: Further arguments of :class:`Answers`.
    """

    def __init__(self, engine: Engine, **options: Any) -> None:
        self._of, self._name = partial(Answers, engine, **options), type(engine).__name__
        self._open: dict[int, Answers] = {}  # by id() of the request
        self._checked: dict[int, tuple[Request, Completion]] = {}  # the request is kept so that its id stays unique
        self._bad: list[tuple[int, int, str]] = []  # sample, turn, fault

    def ask(self, requests: Sequence[Request]) -> None:
        """Store requests before the engine receives them."""
        for request in requests:
            self._open[id(request)] = self._of((request,))

    def check(self, request: Request, completion: Completion) -> Completion:
        """Return the completion, or an aborted one if it is faulty.

        Raises:
            EngineError: If it does not fit the request; names engine, sample, turn and prompt.
        """
        answers = self._open.pop(id(request), None)
        if answers is None:
            raise EngineError(
                f"expected {self._name} to answer each request once, got a second answer to sample "
                f"{request.sample_id}, turn {request.turn}"
            )
        (checked,), faults = answers.examine([completion])
        checked = _give_up(checked) if faults else checked
        self._checked[id(request)] = request, checked
        if faults:
            self._bad.append((request.sample_id, request.turn, f"got {faults[0]} for {answers.where(0)}"))
        return checked

    def answer_to(self, request: Request) -> Completion | None:
        """Return the checked completion of a request, or None if there is none yet."""
        return self._checked.get(id(request), (request, None))[1]

    def close(self) -> None:
        """Warn of aborted samples.

        Raises:
            EngineError: If they are too many.
        """
        if self._bad:
            judge(len(self._bad), len(self._checked), min(self._bad)[-1], self._name)


def judge(bad: int, given: int, first: str, engine: str) -> None:
    """Warn of faulty samples.

    Raises:
        EngineError: If they are more than one and more than :data:`MAX_REFUSED` of all.
    """
    if bad > max(1, MAX_REFUSED * given):
        raise EngineError(
            f"expected valid samples from {engine}, {first}, and {bad} of {given} samples are faulty: look for the "
            "fault in the engine, its dtype first"
        )
    warnings.warn(f"{bad} of {given} samples from {engine} are aborted and do not train: {first}", stacklevel=4)


def _give_up(completion: Completion) -> Completion:
    scores = completion.logprobs
    return replace(completion, finish=FinishReason.ABORT, logprobs=None if scores is None else torch.zeros_like(scores))


def _describe(scores: Tensor) -> str:
    gradient = " with a gradient, which holds a whole graph" if scores.requires_grad else ""
    return f"{scores.dtype} of shape {list(scores.shape)}{gradient}"
