"""Batches for the properties: ragged rows of every kind, as one LossView with every field; and ways to disturb them."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_rl import FinishReason, LossView
from lightning_rl.corrections import OUTPUTS
from lightning_rl.rollout import GREEDY_SCORE, SUM_PI_SQUARED, TOKEN, concatenate, segments_of, turn_numbers

WIDEST = 6
KINDS = ("ragged", "ragged", "holes", "holes", "full", "empty", "masked", "dropped", "padding")
Row = tuple[str, int, int, bool]

known: dict[str, Any] = {"derandomize": True, "database": None, "deadline": None}
known["suppress_health_check"] = [HealthCheck.too_slow]
few, some, many = (settings(max_examples=number, **known) for number in (4, 8, 20))


def rows(*, kinds: Sequence[str] = KINDS, fewest: int = 1, most: int = 7) -> st.SearchStrategy[list[Row]]:
    """A kind, the bits of a mask, a group and whether the row is rewarded, for each row."""
    one = st.tuples(
        st.sampled_from(kinds), st.integers(0, 2**WIDEST - 1), st.integers(0, 2), st.integers(0, 4).map(bool)
    )
    return st.lists(one, min_size=fewest, max_size=most)


def views(*, kinds: Sequence[str] = KINDS, fewest: int = 1, most: int = 7) -> st.SearchStrategy[LossView]:
    """Views of such rows; numbers follow from a seed."""
    return st.builds(view_of_rows, rows(kinds=kinds, fewest=fewest, most=most), st.integers(0, 2**16))


def view_of_rows(given: Sequence[Row], seed: int = 0) -> LossView:
    """Float64 fields with drift between every two policies, 0 at invalid tokens; rewards with and without ties."""
    number = len(given)
    draw = torch.Generator().manual_seed(seed)
    lengths, actions = zip(*[_mask(kind, bits) for kind, bits, _, _ in given], strict=True)
    real = torch.tensor([kind != "padding" for kind, *_ in given])
    trained = torch.tensor([kind not in ("padding", "dropped") for kind, *_ in given])
    rewarded = torch.tensor([kept for *_, kept in given]) & trained
    action_mask = torch.tensor(actions).reshape(number, WIDEST)
    valid = action_mask & trained[:, None]
    groups = torch.where(real, torch.tensor([group for _, _, group, _ in given]), -1)

    def noise(scale: float = 1.0) -> Tensor:
        return torch.where(valid, torch.randn(number, WIDEST, generator=draw, dtype=torch.float64) * scale, 0.0)

    rollout = torch.where(valid, -noise().abs() - 0.1, 0.0)
    old = rollout + noise(0.15)
    turns = torch.where(action_mask, (action_mask & ~F.pad(action_mask, (1, 0))[:, :-1]).cumsum(-1), 0)
    truncated = real & torch.tensor([bits % 3 == 0 for _, bits, *_ in given])
    rewards = torch.randint(0, 3, (number,), generator=draw).double()
    greedy = torch.randn(4, generator=draw, dtype=torch.float64)[groups]
    return LossView(
        prompt_ids=torch.full((number, 1), 2),
        prompt_lengths=torch.ones(number, dtype=torch.int64),
        response_ids=torch.full((number, WIDEST), 3),
        response_lengths=torch.tensor(lengths),
        action_mask=action_mask,
        valid_tokens=valid,
        groups=groups,
        sample_ids=torch.where(real, torch.arange(number) + 7, -1),
        finish=torch.where(truncated, FinishReason.LENGTH, FinishReason.STOP).byte(),
        policy_version=torch.where(action_mask, 0, -1),
        trained=trained,
        rewarded=rewarded,
        rewards=torch.where(real, rewards, 0.0),
        rewards_by_function={"task": rewards, "other": torch.zeros_like(rewards)},
        rollout_logprobs=rollout,
        old_logprobs=old,
        ref_logprobs=old + noise(0.3),
        values=noise(0.5),
        advantages=noise(),
        returns=noise(),
        segments=segments_of(turns, torch.tensor(lengths)),
        extras={GREEDY_SCORE: greedy},
        token_extras={
            "teacher_logprobs": old + noise(0.3),
            SUM_PI_SQUARED: torch.where(valid, (2 * old).exp() * 1.25, 0.0),
        },
        logprobs=old + noise(0.25),
        entropy=noise().abs(),
        current_values=noise(0.5),
        **dict[str, Any](
            (spec.name, place + noise(0.1).abs()) for place, spec in enumerate(one for one in OUTPUTS if one.inputs)
        ),
    )


def _mask(kind: str, bits: int) -> tuple[int, list[bool]]:
    length = {"full": WIDEST, "empty": 0, "padding": 0}.get(kind, 1 + bits % WIDEST)
    hole = [kind == "masked" or (kind == "holes" and not bits >> place & 1) for place in range(WIDEST)]
    return length, [place < length and not hole[place] for place in range(WIDEST)]


WITNESS = view_of_rows(
    [
        ("full", 9, 0, True),
        ("holes", 45, 0, True),
        ("ragged", 4, 0, True),
        ("full", 2, 1, True),
        ("holes", 59, 1, True),
        ("empty", 1, 1, True),
        ("ragged", 3, 1, False),
        ("masked", 4, 2, True),
        ("dropped", 5, 2, True),
        ("full", 0, 2, True),
        ("padding", 0, 0, True),
    ],
    seed=20,
)
"""Eleven rows of every kind for what needs no search: two groups have a spread of rewards, one has none."""


def disturbed(view: LossView, value: float | None = None) -> LossView:
    """Another number at every invalid token of every float field: ``value``, or noise."""
    draw = torch.Generator().manual_seed(11)

    def spoil(tensor: Tensor, axis: object, _pad: float) -> Tensor:
        if axis != TOKEN or not tensor.is_floating_point():
            return tensor
        other = torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype) if value is None else value
        return torch.where(view.valid_tokens, tensor, other)

    return view.map(spoil)


def inserted(view: LossView, place: int, number: int = 2) -> LossView:
    """``number`` masked tokens more before position ``place`` of every row: a tool's answer, or padding."""

    def widen(tensor: Tensor, axis: object, pad: float) -> Tensor:
        if axis != TOKEN:
            return tensor
        middle = tensor.new_full((len(tensor), number), 7.0 if tensor.is_floating_point() else pad)
        return torch.cat([tensor[:, :place], middle, tensor[:, place:]], 1)

    lengths = view.response_lengths + number * (view.response_lengths > place)
    segments = segments_of(widen(turn_numbers(view), TOKEN, 0), lengths)
    return view.map(widen).replace(response_lengths=lengths, segments=segments)


def without_columns(tensor: Tensor, place: int, number: int = 2) -> Tensor:
    """The inverse of :func:`inserted` on a tensor [b, T + number]."""
    return torch.cat([tensor[:, :place], tensor[:, place + number :]], 1)


def twice(view: LossView) -> LossView:
    """Every row again, as another sample of another group."""
    other = view.replace(
        sample_ids=torch.where(view.real, view.sample_ids + 1000, -1),
        groups=torch.where(view.real, view.groups + 50, -1),
    )
    return joined(view, other)


def joined(*parts: LossView) -> LossView:
    """Views row by row."""
    whole = concatenate(parts)
    assert isinstance(whole, LossView)
    return whole


def shuffled_tokens(view: LossView, seed: int = 3) -> tuple[LossView, Tensor]:
    """Valid tokens in another order within each row, every field alike; with the order, shape [b, T]."""
    keys = torch.rand(view.valid_tokens.shape, generator=torch.Generator().manual_seed(seed))
    places = torch.arange(view.width).expand_as(keys)
    order = places.clone()
    for row, valid in enumerate(view.valid_tokens):
        own = places[row][valid]
        order[row, valid] = own[keys[row][valid].argsort()]
    return view.map(lambda tensor, axis, _pad: tensor.gather(1, order) if axis == TOKEN else tensor), order
