"""Properties of a run's algorithm on one fixed batch, checked before its first rollout without a model."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from io import StringIO

import torch
from torch import Tensor

from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import RLCallback
from lightning_rl.testing.properties import PROPERTIES
from lightning_rl.testing.properties.case import AlgorithmCase
from lightning_rl.testing.properties.comparisons import bitwise_equal
from lightning_rl.testing.properties.copies import repeatable
from lightning_rl.testing.properties.rows import Row, add_fields_of, rollout_of_rows
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.seeding import fork_generators

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
STAGES: Mapping[str, Callable[[AlgorithmCase], Tensor]] = {
    "masked_values excluded_rows padding_width group_isolation reward_shift advantage_direction row_order "
    "reward_conservation": lambda case: case.advantages_of(case.groups),
    "gradient_liveness loss_direction partition loss_padding_width loss_masked_values denominators sequence_decisions "
    "distances_pull_back terms_add_up": lambda case: case.table_step().gradient,
}
"""Stages of a run, by the names of the checked properties that repeat them."""


def broken_properties(algorithm: Algorithm, callbacks: Iterable[RLCallback]) -> list[Finding]:
    """Return a finding for each property that an algorithm with some corrections does not have on :data:`ROWS`.

    Copies of its parts run, so that neither they nor random generators change. A property is left out if a part cannot
    be copied, holds a model, needs something that the rows lack, or returns something else when it is called again.
    """
    broken = dict[str, Finding]()
    with fork_generators(torch.device("cpu")), warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        with suppress(Exception):
            repeated, rollout = repeatable(algorithm, callbacks, models=False), rollout_of_rows(ROWS)
            with suppress(Exception):
                rollout = add_fields_of(rollout, repeated.corrections.callbacks)
            rows = rollout.select(rollout.trained)
            case = AlgorithmCase(algorithm=repeated, rollout=rollout, groups=rollout, rows=rows)
            for names, stage in STAGES.items():
                repeats = True
                with suppress(Exception):
                    repeats = bitwise_equal(stage(case), stage(case))
                for name in names.split() if repeats else ():
                    with suppress(Exception):
                        for finding in PROPERTIES[name].violations(case):
                            broken.setdefault(name, replace(finding, samples=(), positions=()))
    return list(broken.values())
