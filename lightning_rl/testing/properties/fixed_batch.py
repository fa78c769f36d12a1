"""Properties of a run's algorithm on one fixed batch, checked before its first rollout without a model."""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from io import StringIO
from typing import TypeVar

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import RLCallback
from lightning_rl.testing.properties import PROPERTIES
from lightning_rl.testing.properties.case import AlgorithmCase
from lightning_rl.testing.properties.check import Verdict, raiser_of
from lightning_rl.testing.properties.comparisons import bitwise_equal
from lightning_rl.testing.properties.copies import CopyError, repeatable
from lightning_rl.testing.properties.rows import Row, add_fields_of, rollout_of_rows
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.seeding import fork_generators

Value = TypeVar("Value")
CHANGES = "a part of the algorithm returns something else when it is called again"
ROWS = (
    Row(tokens=(True,), reward=0),
    Row(tokens=(True,) * 3, reward=1),
    Row(tokens=(True,) * 5, reward=0, truncated=True),
    Row(tokens=(True,) * 2, reward=2),
    Row(tokens=(True, False, True, True, True), prompt=1, reward=1),
    Row(tokens=(True,) * 3, prompt=1, reward=0),
    Row(tokens=(), prompt=1, trained=False, rewarded=False),
    Row(tokens=(True,) * 4, prompt=1, reward=3, rewarded=False),
    Row(tokens=(True,) * 5, prompt=2, reward=1),
    Row(tokens=(True,) * 2, prompt=2, reward=1),
    Row(tokens=(True,) * 3, prompt=2, reward=1, truncated=True),
    Row(tokens=(False, True, True), prompt=2, reward=1),
)
Calls = tuple[Callable[[AlgorithmCase], Tensor], Callable[[AlgorithmCase], Tensor]]
STAGES: Mapping[str, Calls] = {
    "masked_values excluded_rows padding_width group_isolation reward_shift advantage_direction row_order "
    "reward_conservation": (lambda case: case.advantages, lambda case: case.advantages_of(case.groups)),
    "gradient_liveness loss_direction partition loss_padding_width loss_masked_values denominators sequence_decisions "
    "distances_pull_back terms_add_up": (
        lambda case: case.whole_step.gradient,
        lambda case: case.table_step().gradient,
    ),
}
"""Two calls of a stage of a run, the first one kept, by the names of the checked properties that repeat the stage."""
MAX_SECONDS = 2.0  # after which no further property is checked; parts of the library take 0.05


def judge_fixed_batch(algorithm: Algorithm, callbacks: Iterable[RLCallback]) -> Verdict:
    """Return a finding for each property that an algorithm with some corrections does not have on :data:`ROWS`.

    Copies of its parts run, so that neither they nor random generators change. A property is skipped if a part cannot
    be copied, holds a model, raises, or returns something else when it is called again, and after :data:`MAX_SECONDS`.
    """
    broken, skipped, end = dict[str, Finding](), dict[str, str](), time.monotonic() + MAX_SECONDS
    with fork_generators(torch.device("cpu")), warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        case, why = _attempt(lambda: _case_of(algorithm, callbacks), end)
        if case is None:
            return Verdict([], dict.fromkeys(" ".join(STAGES).split(), why))
        for names, calls in STAGES.items():
            (first, _), (second, _) = (_attempt(partial(call, case), end) for call in calls)
            repeats = first is None or second is None or bitwise_equal(first, second)
            for name in names.split():
                check = partial(PROPERTIES[name].violations, case)
                findings, why = _attempt(check, end) if repeats else (None, CHANGES)
                if findings is None:
                    skipped[name] = why
                for finding in findings or ():
                    broken.setdefault(name, replace(finding, samples=(), positions=()))
    return Verdict(list(broken.values()), skipped)


def _case_of(algorithm: Algorithm, callbacks: Iterable[RLCallback]) -> AlgorithmCase:
    """Return copies of the parts of an algorithm, and the rows with the fields that its corrections declare."""
    repeated, rollout = repeatable(algorithm, callbacks, models=False), rollout_of_rows(ROWS)
    for callback in sorted(repeated.corrections.callbacks, key=lambda one: "provide" not in one.contributes):
        with suppress(Exception):  # what reads the missing field is skipped
            rollout = add_fields_of(rollout, [callback])
    return AlgorithmCase(algorithm=repeated, rollout=rollout, groups=rollout, rows=rollout.select(rollout.trained))


def _attempt(call: Callable[[], Value], end: float) -> tuple[Value | None, str]:
    """Return the result of a call, or None and the reason why there is none, such as the end of the time."""
    if time.monotonic() >= end:
        return None, f"the checks before took {MAX_SECONDS:g} seconds"
    try:
        return call(), ""
    except CopyError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001  of user code on made-up rows
        return None, f"{raiser_of(error)} raised {type(error).__name__}: {error}"


def skipped_checks(verdict: Verdict) -> list[str]:
    """Return a line for each reason of skipped checks, with their names."""
    return [
        f"{', '.join(name for name, other in verdict.skipped.items() if other == why)}: skipped, because {why}"
        for why in dict.fromkeys(verdict.skipped.values())
    ]
