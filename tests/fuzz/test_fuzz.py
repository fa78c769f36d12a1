"""Anything may come in: a value or a ValueError; what is cut and joined is the same. Long: 10,000 examples each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lightning_rl import Rollout
from lightning_rl.policy.plan import make_plan
from lightning_rl.recording import Recording
from lightning_rl.rollout import concatenate
from lightning_rl.serialization import describe, restorable, restore
from lightning_rl.signal.reductions import REDUCTIONS
from lightning_rl.utils.terminal import visible

EXAMPLES = [pytest.param(30, id="some"), pytest.param(10_000, id="many", marks=pytest.mark.long)]
NAMES = [*restorable(), "os.system", "builtins.eval", "lightning_rl.audit.saved.torch.load", "../x.y", ""]
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
    """Runs a test on so many examples."""
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
    """What a function returns, or the ValueError that it raises; anything else that it raises fails the test."""
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


ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=5), st.lists(st.integers(0, 99), max_size=6)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_what_is_cut_padded_and_joined_is_the_same(examples: int) -> None:
    def test(drawn: tuple[list[tuple[list[int], list[int]]], int, int]) -> None:
        rows, cut, more = drawn
        whole = Rollout.of_samples([p for p, _ in rows], [r for _, r in rows], groups=list(range(len(rows))))
        at = cut % (len(rows) + 1)
        index = torch.arange(len(rows))
        wide = concatenate([whole.select(index[:at]).fit_width(whole.width + more), whole.select(index[at:])])
        again = Rollout.from_state(concatenate([wide, wide.padding_rows(more)]).state())
        back = again.select(again.real).fit_width(whole.width)
        assert all(
            name == other and torch.equal(one, two)
            for (name, one), (other, two) in zip(whole.tensors(), back.tensors(), strict=True)
        )
        shuffled = whole.select(index.flip(0)).select(index.flip(0))
        assert torch.equal(shuffled.response_ids, whole.response_ids)

    fuzz(test, st.tuples(ROWS, st.integers(0, 99), st.integers(0, 3)), examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_plan_holds_every_row_once_and_packing_every_token(examples: int) -> None:
    def test(drawn: tuple[list[tuple[list[int], list[int]]], int, bool]) -> None:
        rows, budget, packed = drawn
        rollout = Rollout.of_samples([p for p, _ in rows], [r for _, r in rows], groups=list(range(len(rows))))
        plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=budget, packed=packed)
        planned = [row for step in plan.rows() for microbatch in step for row in microbatch]
        assert sorted(planned) == list(range(len(rows)))

    fuzz(test, st.tuples(ROWS, st.integers(1, 40), st.booleans()), examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_reductions_weigh_valid_tokens_alone_and_sum_to_no_more_than_one(examples: int) -> None:
    masks = st.integers(1, 6).flatmap(
        lambda rows: st.lists(
            st.tuples(st.lists(st.booleans(), min_size=4, max_size=4), st.booleans(), st.integers(0, 3)),
            min_size=rows,
            max_size=rows,
        )
    )

    def test(rows: list[tuple[list[bool], bool, int]]) -> None:
        trained = torch.tensor([row[1] for row in rows])
        valid = torch.tensor([row[0] for row in rows]) & trained[:, None]
        groups = torch.tensor([row[2] for row in rows])
        for reduction in REDUCTIONS.values():
            weights = reduction(valid, trained, groups, lambda tensor: tensor)
            assert weights.isfinite().all() and (weights[~valid] == 0).all() and (weights[valid] > 0).all()
            assert weights.sum() <= 1 + 1e-12

    fuzz(test, masks, examples)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_nothing_that_a_terminal_acts_on_is_left(examples: int) -> None:
    def test(text: str) -> None:
        assert all(mark == "\n" or mark.isprintable() or mark.isspace() for mark in visible(text))
        assert not set(visible(text)) & set(map(chr, [*range(10), *range(11, 32), *range(127, 160), 0x202E, 0x2066]))

    fuzz(test, st.text(), examples)
