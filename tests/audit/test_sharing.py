"""Memory that a reward shares with a copy of the process is found where the reward can reach it."""

import ctypes
import mmap
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from kit.support import parity_reward

from lightning_rl.audit.replies import RewardQuestions
from lightning_rl.audit.sharing import shared_memory_of
from lightning_rl.rewards import ExactMatch, MathMatch, RewardCall

Reward = Callable[..., Any]


def closing_over(state: Any) -> Reward:
    def reward(completions: Any, **_: Any) -> Any:
        return [float(len(text) > 0 and state is not None) for text in completions]

    return reward


class Judge:
    """A reward with a state."""

    def __init__(self, state: Any) -> None:
        self.parts = {"inner": [state]}

    def __call__(self, completions: Any, **_: Any) -> Any:
        """Nothing for anybody."""
        return [0.0 for _ in completions]

    def score(self, completions: Any, **_: Any) -> Any:
        """The same."""
        return self(completions)


def by_a_module(state: Any) -> Reward:
    module = ModuleType("own_module")
    module.__file__ = "/home/somebody/own_module.py"
    module.state = state  # pyright: ignore[reportAttributeAccessIssue]
    return closing_over(module)


PLACES: dict[str, Callable[[Any], Reward]] = {
    "closure": closing_over,
    "instance": Judge,
    "method": lambda state: Judge(state).score,
    "partial": lambda state: partial(parity_reward, state=state),
    "default": lambda state: lambda completions, kept=state, **_: [float(kept is None) for _ in completions],
    "class": lambda state: type("Own", (Judge,), {"__module__": __name__, "shared": state})(None),
    "module": by_a_module,
    "function within": lambda state: closing_over(closing_over(state)),
}
STATES: dict[str, Callable[[], Any]] = {
    "a tensor in shared memory": lambda: torch.zeros(1).share_memory_(),
    "a mmap": lambda: mmap.mmap(-1, 8),
    "a Synchronized of multiprocessing": lambda: multiprocessing.Value("i", 0),
    "a SynchronizedArray of multiprocessing": lambda: multiprocessing.Array("i", 3),
    "a ctypes object": lambda: multiprocessing.RawValue(ctypes.c_int, 0),
    "a Lock of multiprocessing": multiprocessing.Lock,
}


@pytest.mark.parametrize("place", PLACES)
def test_shared_memory_is_found_wherever_the_reward_keeps_it(place: str) -> None:
    state = torch.zeros(1).share_memory_()
    assert shared_memory_of(PLACES[place](state)) == "a tensor in shared memory"
    assert shared_memory_of(PLACES[place](torch.zeros(1))) == ""


@pytest.mark.parametrize("what", STATES)
def test_every_kind_of_shared_memory_is_known(what: str) -> None:
    assert shared_memory_of(closing_over(STATES[what]())) == what


def test_arrays_of_shared_memory_are_known(tmp_path: Path) -> None:
    block = SharedMemory(create=True, size=8)
    try:
        assert shared_memory_of(closing_over(np.ndarray(1, np.int64, block.buf))) == "a mmap"
        assert shared_memory_of(closing_over(block)) == "a SharedMemory"
    finally:
        block.close()
        block.unlink()
    assert shared_memory_of(closing_over(np.memmap(tmp_path / "x", np.int8, "w+", shape=4))) == "a memmap"


def test_what_ranks_and_loaders_map_is_not_the_rewards() -> None:
    elsewhere = torch.zeros(9).share_memory_(), mmap.mmap(-1, 8)
    for reward in (parity_reward, ExactMatch(), MathMatch(), closing_over({"weights": [torch.ones(3)]}), Judge(sys)):
        assert shared_memory_of(reward) == ""
    assert len(elsewhere) == 2


def test_a_reward_that_can_reach_shared_memory_is_not_asked_again() -> None:
    shared = torch.zeros(1).share_memory_()

    def counting(completions: Any, **_: Any) -> Any:
        shared.add_(1.0)
        return [float(shared)] * len(completions)

    call = RewardCall("judge", [[2]] * 4, [1.0] * 4, 0.0, ["a"] * 4, ["b"] * 4, {}, counting)
    (reply,) = RewardQuestions([call], [range(4)]).replies()
    assert reply.reason.startswith("reward judge can reach a tensor in shared memory, which a copy of the process")
    assert float(shared) == 0.0
