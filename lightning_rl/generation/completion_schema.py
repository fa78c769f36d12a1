"""Validation of the fields of a completion.

A field of a wrong type is reported here, in one message, instead of by a later error of torch. Integers of numpy are
converted to int, as tokenizers and JSON require.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from lightning_rl.generation.engine import Completion
from lightning_rl.rollout import ROUTES, FinishReason

SHOWN = 8  # token ids in a message
PRECISE = (torch.float32, torch.float64)


class FormError(ValueError):
    """Malformed completion.

    Args:
        expected: Description of a valid value.
        got: Description of the actual value.
        cure: Advice for the engine's author.
    """

    def __init__(self, expected: str, got: str, cure: str) -> None:
        super().__init__(f"expected {expected}, got {got}: {cure}")
        self.expected, self.got, self.cure = expected, got, cure


def check_form(
    given: Any, *, logprobs: bool, prompt_length: int = 0, extras: frozenset[str] = frozenset()
) -> Completion:
    """Return a completion of tuples of ints, with a log-probability for each token and extras of matching lengths.

    Args:
        given: Object that an engine returned as a completion.
        logprobs: True if each token needs a log-probability.
        prompt_length: Number of tokens of the prompt.
        extras: Names of the extras that the engine has to record.

    Raises:
        FormError: If a field is malformed.
    """
    if not isinstance(given, Completion) or not isinstance(given.finish, FinishReason):
        cure = "return Completion(token_ids=, logprobs=, finish=FinishReason.STOP, version=self.version)"
        raise FormError("a Completion with a FinishReason", _show(given), cure)
    ids = _token_ids(given.token_ids)
    versions = given.versions if given.versions is None else _versions(given.versions, len(ids))
    _check_whole("version", given.version)
    if given.sample_id is not None:
        _check_whole("sample_id", given.sample_id)
    scores = given.logprobs
    if logprobs and scores is None and given.finish is FinishReason.ABORT:
        scores = torch.zeros(len(ids))
    if logprobs:
        _check_logprobs(scores, len(ids))
    _check_extras(given, (len(ids), prompt_length), extras)
    same = ids is given.token_ids and versions is given.versions and scores is given.logprobs
    return given if same else replace(given, token_ids=ids, versions=versions, logprobs=scores)


def _show(value: Any) -> str:
    """Return a short representation of a value, even if its ``repr`` fails."""
    try:
        return repr(value)[:100]
    except Exception:  # noqa: BLE001  foreign code
        return f"a {type(value).__name__}"


def _sequence(name: str, value: Any, cure: str) -> tuple[Any, ...]:
    """Return the entries of a list or tuple."""
    if type(value) is tuple:
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise FormError(f"{name} as a tuple", f"a {type(value).__name__}", cure)
    return tuple(value)


def _token_ids(given: Any) -> tuple[int, ...]:
    ids = _sequence("token ids", given, "return a tuple of ints, such as tuple(tensor.tolist())")
    kinds = set(map(type, ids))
    if kinds <= {int}:
        return ids
    if any(kind is bool or not issubclass(kind, Integral) for kind in kinds):
        cure = "return the ids of the tokens, as ints"
        raise FormError("token ids that are whole numbers", _show(list(ids[:SHOWN])), cure)
    return tuple(map(int, ids))


def _versions(given: Any, number: int) -> tuple[int, ...]:
    cure = "leave versions None if all tokens are of `version`, or pass one for each token"
    versions = _sequence("versions of tokens", given, cure)
    if len(versions) != number:
        raise FormError(f"a version for each of {number} tokens", str(len(versions)), cure)
    for version in versions:
        _check_whole("version of each token", version)
    return versions if set(map(type, versions)) <= {int} else tuple(map(int, versions))


def _check_whole(name: str, value: Any) -> None:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        cures = {"sample_id": "pass request.sample_id, or None"}
        cure = cures.get(name, "pass self.version, which load_weights sets")
        raise FormError(f"a whole number as {name}", _show(value), cure)


def _check_logprobs(scores: Any, number: int) -> None:
    expected = f"a log-probability for each of {number} tokens"
    cure = f"return a float32 tensor of shape [{number}], as of logits.float().log_softmax(-1) under torch.no_grad()"
    if not isinstance(scores, Tensor):
        raise FormError(expected, "none" if scores is None else f"a {type(scores).__name__}", cure)
    for got in _flaws(scores, number):
        raise FormError(expected, got, cure)


def _flaws(scores: Tensor, number: int) -> Iterator[str]:
    """Yield the faults of log-probabilities, the most basic first."""
    if scores.layout != torch.strided or scores.is_meta:
        yield "a tensor on the meta device, without values" if scores.is_meta else f"a tensor of layout {scores.layout}"
    if scores.shape != (number,):
        yield f"{len(scores)}" if scores.dim() == 1 else f"{list(scores.shape)}"
    if scores.dtype not in PRECISE:
        yield f"{scores.dtype}"
    if scores.requires_grad:
        yield "a tensor with a gradient, which holds a whole graph"


def _check_extras(given: Completion, lengths: tuple[int, int], names: frozenset[str]) -> None:
    """Check the extras of the response, and of the prompt for expert routes."""
    fields = (("token_extras", names, lengths[0]), ("prompt_extras", names & {ROUTES}, lengths[1]))
    for field, recorded, length in fields:
        extras: Any = getattr(given, field)
        if extras == {} and not recorded:
            continue
        if not isinstance(extras, Mapping) or not all(isinstance(each, Tensor) for each in extras.values()):
            raise FormError(f"{field} as tensors by name", _show(extras), "pass {} if there are none")
        for name in sorted(recorded):
            got = _entries(extras.get(name))
            if got != length:
                cure = f"put it into {field}, an entry for each token along its first axis"
                raise FormError(f"{name} of each of {length} tokens", "nothing" if got is None else str(got), cure)


def _entries(extra: Tensor | None) -> int | None:
    return None if extra is None or not extra.dim() else len(extra)
