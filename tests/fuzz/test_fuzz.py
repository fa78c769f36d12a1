"""Anything may come in: a value or a ValueError; what is cut and joined is the same. Long: 10,000 examples each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_rl.recording import Recording
from lightning_rl.serialization import describe, restorable, restore
from lightning_rl.utils.terminal import visible

EXAMPLES = [pytest.param(30, id="some"), pytest.param(10_000, id="many", marks=pytest.mark.nightly)]
NAMES = [*restorable(), "os.system", "builtins.eval", "lightning_rl.checkpointing.checksum.torch.load", "../x.y", ""]
MARKS = ["class_path", "init_args", "name", "partial", "args", "keywords", "closure"]
OPTIONS = ["delta", "clip_low", "clip_high", "function", "beta", "name", "estimator", "coef", "length", "mean", "level"]
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(NAMES)
KEYS = st.sampled_from(MARKS) | st.sampled_from(OPTIONS) | st.text(max_size=3)
ANYTHING = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
STATES = st.dictionaries(st.sampled_from(OPTIONS), ANYTHING, max_size=3)
PARTS = st.builds(lambda name, state: {"class_path": name, "init_args": state}, st.sampled_from(NAMES), STATES)


def fuzz(test: Callable[[Any], None], data: st.SearchStrategy[Any], examples: int) -> None:
    """Run a test on a number of examples."""
    quick = [Phase.explicit, Phase.generate] if examples > 100 else list(Phase)
    wanted = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=quick,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    wanted(given(data)(test))()


def outcome(function: Callable[[Any], Any], value: Any) -> tuple[Any, str]:
    """Return the result of a function, or the message of its ValueError; other exceptions fail the test."""
    try:
        return function(value), ""
    except ValueError as refused:
        return None, str(refused) or "nothing"


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_description_is_a_value_or_a_sentence(examples: int) -> None:
    def test(description: Any) -> None:
        value, refused = outcome(restore, description)
        assert refused or repr(describe(value))

    fuzz(test, ANYTHING | PARTS, examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_bytes_are_no_header(examples: int, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(8.0), "b": [1, "x"]}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    flips = st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=4)
    flipped = st.tuples(flips, st.integers(0, len(whole))).map(lambda each: spoil(whole, *each))

    def test(content: bytes) -> None:
        (tmp_path / "a.json").write_bytes(content)
        (tmp_path / "a.safetensors").touch()
        with pytest.raises(ValueError, match="expected"):
            Recording.load(tmp_path / "a.json")

    fuzz(test, st.binary(max_size=300) | flipped, examples)


def spoil(content: bytes, flips: list[tuple[int, int]], length: int) -> bytes:
    """Some bytes changed, and cut unless the length is even."""
    changed = bytearray(content)
    for at, value in flips:
        changed[at] = value
    return bytes(changed if length % 2 == 0 else changed[:length])


@pytest.mark.parametrize("examples", EXAMPLES)
def test_nothing_that_a_terminal_acts_on_is_left(examples: int) -> None:
    def test(text: str) -> None:
        assert all(mark == "\n" or mark.isprintable() or mark.isspace() for mark in visible(text))
        assert not set(visible(text)) & set(map(chr, [*range(10), *range(11, 32), *range(127, 160), 0x202E, 0x2066]))

    fuzz(test, st.text(), examples)
