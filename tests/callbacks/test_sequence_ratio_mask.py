"""SequenceRatioMask: the mean or the sum of the valid tokens' log-ratios decides for the whole row."""

import math

import pytest
from kit.support import run_step, view_of

from lightning_rl import LossView, Reinforce
from lightning_rl.callbacks import SequenceRatioMask, TruncatedIS

NAN = math.nan


def far(number: int) -> LossView:
    """A row with a log-ratio of 0.1 at each of its tokens."""
    return view_of([-1.0] * number, old_logprobs=[0.1] * number, rollout_logprobs=[0.0] * number)


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        pytest.param([0.0, 0.0, NAN], True, id="on-policy"),
        pytest.param([0.3, -0.3, NAN], True, id="cancels"),
        pytest.param([0.2, 0.0, NAN], True, id="mean-0.1-within"),
        pytest.param([0.3, 0.0, NAN], False, id="mean-0.15-above"),
        pytest.param([-0.3, 0.0, NAN], False, id="mean-0.15-below"),
    ],
)
def test_keeps_rows_whose_mean_ratio_lies_within(old: list[float], kept: bool) -> None:
    view = view_of([-1.0] * 3, old_logprobs=old, rollout_logprobs=[0.0] * 3, valid=[True, True, False])
    assert SequenceRatioMask("geometric", math.exp(-0.12), math.exp(0.12)).sequence_mask(view).tolist() == [kept]


@pytest.mark.parametrize(
    ("old", "kept"),
    [
        pytest.param([0.3, 0.3, NAN], True, id="within"),
        pytest.param([0.4, 0.3, NAN], False, id="above-2"),
        pytest.param([-0.4, -0.3, NAN], False, id="below-half"),
        pytest.param([5.0, -5.0, NAN], True, id="cancels"),
    ],
)
def test_keeps_rows_whose_product_lies_within(old: list[float], kept: bool) -> None:
    view = view_of([-1.0] * 3, old_logprobs=old, rollout_logprobs=[0.0] * 3, valid=[True, True, False])
    assert SequenceRatioMask("product").sequence_mask(view).tolist() == [kept]


@pytest.mark.parametrize(
    ("old", "band", "kept"),
    [
        pytest.param([0.5, -9.0, NAN], (0.0, 2.0), True, id="within"),
        pytest.param([0.8, -9.0, NAN], (0.0, 2.0), False, id="one-above"),
        pytest.param([-0.5, -9.0, NAN], (0.7, 2.0), False, id="all-below"),
        pytest.param([-0.2, -9.0, NAN], (0.7, 2.0), True, id="the-largest-is-not-below"),
    ],
)
def test_keeps_rows_whose_largest_ratio_lies_within(old: list[float], band: tuple[float, float], kept: bool) -> None:
    view = view_of([-1.0] * 3, old_logprobs=old, rollout_logprobs=[0.0] * 3, valid=[True, True, False])
    assert SequenceRatioMask("max", *band).sequence_mask(view).tolist() == [kept]


def test_with_the_weight_of_the_sequence_it_is_icepop_of_responses() -> None:
    view = view_of([[-1.0] * 2] * 2, old_logprobs=[[0.3, 0.3], [0.5, 0.3]], rollout_logprobs=[[0.0] * 2] * 2)
    callbacks = [SequenceRatioMask("product", 0.5, 2.0), TruncatedIS("sequence", cap=math.inf)]
    gradient = run_step(view, callbacks=callbacks, loss=Reinforce()).gradient
    assert gradient.flatten().tolist() == pytest.approx([-math.exp(0.6) / 4] * 2 + [0.0] * 2)


def test_the_mean_does_not_depend_on_the_length() -> None:
    mask = SequenceRatioMask("geometric", 0.9, 1.12)
    assert mask.sequence_mask(far(1)).item() and mask.sequence_mask(far(50)).item()


def test_by_its_product_a_long_row_drifts_out() -> None:
    mask = SequenceRatioMask("product")
    assert mask.sequence_mask(far(1)).item() and not mask.sequence_mask(far(50)).item()


def test_a_masked_row_still_counts_in_the_denominator() -> None:
    view = view_of([[-1.0], [-1.0]], old_logprobs=[[-1.0], [0.0]], rollout_logprobs=[[-1.0], [-1.0]])
    step = run_step(view, callbacks=[SequenceRatioMask("geometric")], loss=Reinforce())
    assert step.gradient.tolist() == [[-0.5], [0.0]]
    assert step.metrics["sequence_ratio_mask/rejected"] == 0.5
    assert step.metrics["sequence_ratio_mask/ratio_max"] == pytest.approx(math.e, rel=1e-6)


def test_logs_the_product_before_the_mask() -> None:
    view = view_of([-1.0, -1.0], old_logprobs=[1.0, 1.0], rollout_logprobs=[0.0, 0.0])
    logged = run_step(view, callbacks=[SequenceRatioMask("product")]).metrics
    assert logged["sequence_ratio_mask/ratio"] == pytest.approx(math.exp(2), rel=1e-6)
    assert logged["sequence_ratio_mask/rejected"] == 1.0


def test_the_bounds_of_each_statistic_are_its_own() -> None:
    assert [SequenceRatioMask("geometric").low, SequenceRatioMask("geometric").high] == [0.99, 1.01]
    assert [SequenceRatioMask("product").low, SequenceRatioMask("product").high] == [0.5, 2.0]
    assert [SequenceRatioMask("max").low, SequenceRatioMask("max").high] == [0.0, 5.0]
    assert [SequenceRatioMask("product", high=3.0).low, SequenceRatioMask("product", high=3.0).high] == [0.5, 3.0]
