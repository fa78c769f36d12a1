"""Checks of completions against the requests that they answer.

A wrong order, ids outside the vocabulary, too many tokens, missing log-probabilities, and weights that were never
pushed or are too old are an :class:`EngineError`, which ends the run after a checkpoint. A single sample with an
impossible log-probability or finish reason is aborted with a warning (``engine/aborted``) and does not train; several,
and more than a tenth of all, are an error.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from lightning_rl.generation.engine import Engine, EngineError
from lightning_rl.rollout import ROUTES, FinishReason
from lightning_rl.samples import Completion, Request

ROUNDING = 1e-3  # nats by which rounding may lift the log-probability of a certain token above 0
MAX_REFUSED = 0.1  # share of the completions; a single faulty sample is always tolerated
IMPOSSIBLE = math.log(2.0**-149)  # log of the smallest positive float32, -103.3: no token is sampled at or below it
SHOWN = 8  # token ids in a message


class Answers:
    """Requests sent to an engine and the checks of its completions, in any order. Thread-safe.

    An engine's fault raises at once. The share of faulty samples is judged in :meth:`close`, so that it does not
    depend on the order of the completions.

    Args:
        engine: Engine that answers.
        logprobs: True if each token needs a log-probability.
        vocabulary: Number of token ids of the policy; None if unknown.
        text: Function that decodes a response, special tokens included, to search it for stop strings; None without a
            tokenizer.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        logprobs: bool,
        vocabulary: int | None = None,
        text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.engine, self.logprobs, self.vocabulary, self.text = engine, logprobs, vocabulary, text
        self._name = type(engine).__name__
        self._extras = [("token_extras", name) for name in sorted(engine.extras)]
        self._extras += [("prompt_extras", name) for name in sorted(engine.extras & {ROUTES})]
        self._shapes: dict[tuple[str, str], torch.Size] = {}  # of an entry of each extra, as of the first sample
        self._oldest: dict[tuple[int, int, int, int], int] = {}  # engine's version at each open request, by its key
        self._finishes: list[FinishReason] = []  # of the checked completions
        self._bad: list[tuple[int, int, str]] = []  # sample, turn, fault

    def ask(self, requests: Sequence[Request]) -> None:
        """Store requests before the engine receives them."""
        for request in requests:
            self._oldest[request.key] = self.engine.version

    def check(self, request: Request, given: Completion) -> Completion:
        """Return the completion of a request, or an aborted one (:attr:`FinishReason.ABORT`) if it is faulty.

        Raises:
            EngineError: If it does not fit the request; names engine, sample, turn and prompt.
        """
        oldest = self._oldest.pop(request.key, None)
        if oldest is None:
            raise EngineError(
                f"expected {self._name} to answer each request once, got a second answer to sample "
                f"{request.sample_id}, turn {request.turn}"
            )
        if given.sample_id not in (None, request.sample_id):
            expected, got = f"the completion of sample {request.sample_id}", f"that of sample {given.sample_id}"
            self._refuse(request, expected, got, "put the completions into the order of the requests")
        self._check_ids(request, given.token_ids)
        self._check_versions(request, {given.version, *(given.versions or ())}, oldest)
        self._check_extras(request, given)
        if self.logprobs and given.logprobs is None and given.finish is FinishReason.ABORT:
            given = replace(given, logprobs=torch.zeros(len(given.token_ids)))
        fault = self._check_logprobs(request, given.logprobs, len(given.token_ids)) if self.logprobs else ""
        if given.finish is not FinishReason.ABORT and (fault := fault or self._contradiction(request, given)):
            self._bad.append((request.sample_id, request.turn, f"got {fault} for {self.where(request)}"))
            scores = None if given.logprobs is None else torch.zeros_like(given.logprobs)
            given = replace(given, finish=FinishReason.ABORT, logprobs=scores)
        self._finishes.append(given.finish)
        return given

    def close(self) -> None:
        """Warn of faulty samples, and if the engine aborted every sample, which leaves nothing to train on.

        Raises:
            EngineError: If the faulty samples are more than one and more than :data:`MAX_REFUSED` of all.
        """
        bad, given = len(self._bad), len(self._finishes)
        first = min(self._bad)[-1] if bad else ""
        if bad > max(1, MAX_REFUSED * given):
            raise EngineError(
                f"expected valid samples from {self._name}, {first}, and {bad} of {given} samples are faulty: look for "
                "the fault in the engine, its dtype first"
            )
        if bad:
            warnings.warn(
                f"{bad} of {given} samples from {self._name} are aborted and do not train: {first}", stacklevel=4
            )
        elif given and all(finish is FinishReason.ABORT for finish in self._finishes):
            warnings.warn(
                f"{self._name} aborted every requested sample (FinishReason.ABORT), so nothing trains: look at its "
                "log, and check that prompts fit its context length",
                stacklevel=3,
            )

    def _check_ids(self, request: Request, ids: tuple[int, ...]) -> None:
        if len(ids) > (limit := request.sampling.max_new_tokens):
            cure = "end a response there, with FinishReason.LENGTH"
            self._refuse(request, f"at most {limit} tokens (max_new_tokens)", str(len(ids)), cure)
        top = math.inf if self.vocabulary is None else self.vocabulary
        if ids and not 0 <= min(ids) <= max(ids) < top:
            outside = next(token for token in ids if not 0 <= token < top)
            expected = f"token ids in [0, {self.vocabulary or '...'}), the policy's vocabulary"
            self._refuse(request, expected, str(outside), "sample no other ids, such as those of a padded head")

    def _check_versions(self, request: Request, versions: set[int], oldest: int) -> None:
        for version in versions - self.engine.pushed:
            held = f"tokens of weights that were pushed, the last of which is {self.engine.version}"
            self._refuse(request, held, f"version {version}", "set version=self.version, which load_weights sets")
        if min(versions) < oldest:
            expected = f"tokens of version {oldest}, which it had at the request, or later"
            cure = "finish loading in every copy before load_weights returns, and read the version before a request"
            self._refuse(request, expected, f"version {min(versions)}", cure)

    def _check_logprobs(self, request: Request, scores: Tensor | None, number: int) -> str:
        """Describe the first log-probability that is not finite, or at which no token is sampled."""
        sound = (
            isinstance(scores, Tensor) and scores.dtype in (torch.float32, torch.float64) and not scores.requires_grad
        )
        if scores is None or not (sound and scores.shape == (number,)):
            got = "none" if scores is None else _describe(scores)
            cure = f"return float32 of shape [{number}], such as logits.float().log_softmax(-1) under torch.no_grad()"
            self._refuse(request, f"a log-probability for each of {number} tokens", got, cure)
        if not number:
            return ""
        least, most = map(float, scores.aminmax())  # NaN, if there is one
        if least > IMPOSSIBLE and most <= ROUNDING:
            return ""
        finite = scores.isfinite()
        if len(positive := scores[finite & (scores > ROUNDING)]):
            cure = "return the log_softmax, neither logits nor probabilities"
            self._refuse(request, "log-probabilities of at most 0", f"{float(positive.max()):.4g}", cure)
        position = int((~(finite & (scores > IMPOSSIBLE))).nonzero()[0, 0])
        value = float(scores[position])
        why = ", at which no token is sampled" if math.isfinite(value) else ""
        return f"a log-probability of {value:.6g} at position {position}{why}"

    def _check_extras(self, request: Request, given: Completion) -> None:
        """Check that the response has an entry of each extra for every token, and the prompt one of its routes.

        Entries of all samples have one shape.
        """
        for where, name in self._extras:
            length = len(given.token_ids if where == "token_extras" else request.prefix_ids)
            extra, cure = getattr(given, where).get(name), f"put it into {where}, an entry for each token"
            if extra is None:
                got = "nothing"
            elif not isinstance(extra, Tensor) or not extra.dim():
                got, cure = f"a {type(extra).__name__}", "return a tensor with an entry for each token"
                got = "a tensor without axes" if isinstance(extra, Tensor) else got
            else:
                got = str(len(extra))
            if got != str(length):
                self._refuse(request, f"{name} of each of {length} tokens", got, f"{cure} along its first axis")
            if length and (shape := self._shapes.setdefault((where, name), extra.shape[1:])) != extra.shape[1:]:
                expected = f"{where}[{name!r}] of shape {[length, *shape]}, as of the samples before"
                self._refuse(request, expected, str(list(extra.shape)), "return entries of one shape for all samples")

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

    def _refuse(self, request: Request, expected: str, got: str, cure: str) -> NoReturn:
        raise EngineError(f"expected {expected} from {self._name}, got {got} for {self.where(request)}: {cure}")

    def where(self, request: Request) -> str:
        """Return a description of a sample for messages."""
        ids = request.prefix_ids
        shown = f"{list(ids[:SHOWN])}" + (" ..." if len(ids) > SHOWN else "")
        text = "" if self.text is None else f" {self.text(ids)!r:.80}"
        turn = f"turn {request.turn}, " if request.turn else ""
        return f"sample {request.sample_id} ({turn}prompt {shown}{text})"


def _describe(scores: Tensor) -> str:
    if not isinstance(scores, Tensor):
        return f"a {type(scores).__name__}"
    gradient = " with a gradient, which holds a whole graph" if scores.requires_grad else ""
    return f"{scores.dtype} of shape {list(scores.shape)}{gradient}"
