"""Generators of a conversation's own: in place while its environment runs, and never the run's."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from kit.chatter import generator_states

from lightning_rl.environments.adapters.generator_states import OwnGenerators
from lightning_rl.environments.generators import GeneratorError


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_draws_and_seeds_inside_leave_the_run_s_generators_where_they_are() -> None:
    before, own = generator_states(), OwnGenerators("a game")
    with own.in_place():
        draws()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
    assert generator_states() == before


def test_an_error_inside_leaves_them_too_and_keeps_what_was_drawn() -> None:
    before, own = generator_states(), OwnGenerators("a game", 3)
    with pytest.raises(ZeroDivisionError), own.in_place():
        _ = draws()[0] / 0
    assert generator_states() == before
    expected = random.Random(3)
    expected.random()
    with own.in_place():
        assert random.random() == expected.random()


def test_each_goes_on_where_it_was_whatever_others_do() -> None:
    alone, first, second = OwnGenerators("one", 3), OwnGenerators("one", 3), OwnGenerators("other", 4)
    with alone.in_place():
        expected = [draws(), draws()]
    seen = []
    for _ in range(2):
        with first.in_place():
            seen.append(draws())
        with second.in_place():
            draws()
        draws()
    assert seen == expected


def test_a_thread_is_refused() -> None:
    message = "expected a game, which draws from the global generators, in the main thread .* environment_workers="
    with ThreadPoolExecutor(1) as threads, pytest.raises(GeneratorError, match=message):
        threads.submit(OwnGenerators, "a game").result()
