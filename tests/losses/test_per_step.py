"""Clip-Cov, KL-Cov and M2PO: which tokens of the whole step they choose, however it is cut into views and ranks."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.support import run_step, view_of
from properties.batches import WITNESS
from properties.evaluation import microbatch
from torch.testing import assert_close

from lightning_rl import M2PO, ClipCov, ClippedSurrogate, KLCov, LossView, PolicyLoss
from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.signal.selection import GlobalConcat, local_values

LOSSES: list[PolicyLoss] = [
    ClipCov(fraction=0.2, cov_low=-1.0),
    ClipCov(fraction=1.0, cov_low=0.0),
    KLCov(fraction=0.3),
    M2PO(threshold=0.01),
]
each = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
STEP = WITNESS.replace(
    advantages=WITNESS.require("advantages") + 2.0 * WITNESS.groups[:, None],
    logprobs=WITNESS.logprobs - 1.5 * WITNESS.groups[:, None],
).sanitize()
"""Groups whose means lie far apart, so that the means of a part are not those of the step."""
CUTS = {
    "single rows": [[row] for row in range(11)],
    "halves": [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]],
    "reversed": [[10, 9, 8, 7, 6], [5, 4], [3, 2, 1, 0]],
    "with padding": [[], [9, 2, 4], [], [0, 1, 3, 5, 6, 7, 8, 10], []],
}


def chosen(
    loss: PolicyLoss,
    cut: Sequence[Sequence[int]],
    global_sum: GlobalSum = local_sum,
    global_concat: GlobalConcat = local_values,
    step: LossView = STEP,
) -> set[tuple[int, int]]:
    """Sample and position of every chosen token."""
    views = [microbatch(step, rows)[0].sanitize() for rows in cut]
    prepared = loss.prepare(views, global_sum, global_concat)
    assert prepared is not None
    places = set()
    for view, marks in zip(views, prepared, strict=True):
        assert marks.shape == view.valid_tokens.shape and not (marks & ~view.valid_tokens).any()
        places |= {(int(view.sample_ids[row]), position) for row, position in marks.nonzero().tolist()}
    return places


def prepared(loss: PolicyLoss, view: Any) -> list[list[bool]]:
    found = loss.prepare([view], local_sum, local_values)
    assert found is not None
    return found[0].tolist()


@each
def test_nor_on_the_state_of_any_random_generator(loss: PolicyLoss) -> None:
    torch.manual_seed(0)
    first = chosen(loss, CUTS["halves"])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert chosen(loss, CUTS["halves"]) == first and torch.equal(torch.get_rng_state(), before)


@each
def test_without_prepare_the_loss_says_what_to_do(loss: PolicyLoss) -> None:
    for ask in (loss, loss.metrics):
        with pytest.raises(ValueError, match="expected tokens selected by prepare, got none: call prepare with every"):
            ask(STEP)


COVARIANCE: dict[str, Any] = {"advantages": [1.0, -1.0, 2.0, -2.0], "dtype": torch.float64}
CURRENT = [-1.0, -3.0, -0.5, -3.5]  # means 0 and -2: shares 1, 1, 3, 3


@pytest.mark.parametrize(
    ("fraction", "penalised"),
    [(0.25, [False, False, True, True]), (0.5, [False, False, True, True]), (0.75, [True] * 4), (1.0, [True] * 4)],
)
def test_kl_cov_penalises_the_largest_covariances_ties_included(fraction: float, penalised: list[bool]) -> None:
    assert prepared(KLCov(fraction=fraction), view_of(CURRENT, **COVARIANCE)) == [penalised]


def test_kl_cov_penalises_nothing_where_all_advantages_are_0() -> None:
    view = view_of(CURRENT, old_logprobs=[-1.5, -3.0, -1.0, -3.0], advantages=[0.0] * 4)
    step = run_step(view, loss=KLCov(fraction=0.25))
    assert step.metrics["policy/chosen"] == 0.0 and not step.gradient.any()


def test_kl_cov_by_hand() -> None:
    view = view_of(CURRENT, old_logprobs=[-1.5, -3.0, -1.0, -3.0], **COVARIANCE)
    step = run_step(view, loss=KLCov(fraction=0.25, coef=0.5))
    up, down = math.exp(0.5), math.exp(-0.5)
    surrogate = [-up, 1.0, -2 * up, 2 * down]
    assert float(step.loss) == pytest.approx((sum(surrogate) + 0.5 * 0.5 + 0.5 * 0.5) / 4)
    slopes = [-up / 4, 1.0 / 4, (-2 * up + 0.5) / 4, (2 * down - 0.5) / 4]
    assert step.gradient[0].tolist() == pytest.approx(slopes)
    assert step.metrics["policy/chosen"] == 0.5


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        pytest.param({"cov_low": 0.0, "cov_high": 9.0}, [True] * 4, id="all-candidates"),
        pytest.param({"cov_low": 2.0, "cov_high": 9.0}, [False, False, True, True], id="above-the-lower-bound"),
        pytest.param({"cov_low": 0.0, "cov_high": 2.0}, [True, True, False, False], id="below-the-upper-bound"),
        pytest.param({"cov_low": 1.0, "cov_high": 3.0}, [False] * 4, id="bounds-are-no-part"),
        pytest.param({"cov_low": 0.0, "cov_high": 9.0, "fraction": 0.0}, [False] * 4, id="none"),
    ],
)
def test_clip_cov_leaves_out_candidates_within_the_bounds(options: dict[str, float], left_out: list[bool]) -> None:
    assert prepared(ClipCov(**{"fraction": 1.0, **options}), view_of(CURRENT, **COVARIANCE)) == [left_out]


def test_clip_cov_leaves_alone_what_a_clip_holds_back_already() -> None:
    view = view_of(CURRENT, old_logprobs=[-1.0, -3.0, -1.0, -3.5], **COVARIANCE)  # the third grew by exp(.5)
    assert prepared(ClipCov(fraction=1.0, cov_low=0.0), view) == [[True, True, False, True]]
    assert prepared(ClipCov(fraction=1.0, cov_low=0.0, clip_high=1.0), view) == [[True] * 4]


def test_clip_cov_has_no_loss_where_it_chose_and_that_of_ppo_elsewhere() -> None:
    view = view_of(CURRENT, old_logprobs=[-1.5, -3.0, -1.1, -3.4], **COVARIANCE)
    loss = ClipCov(fraction=1.0, cov_low=2.0, cov_high=9.0)
    step, plain = run_step(view, loss=loss), run_step(view, loss=ClippedSurrogate())
    assert plain.gradient[0].count_nonzero() == 2  # a clip holds back the first and the third
    assert_close(step.gradient, torch.where(torch.tensor([[False, False, False, True]]), 0.0, plain.gradient))
    assert (
        step.metrics["policy/chosen"] == 0.25
        and {"policy/clip_fraction_low", "policy/clip_fraction_high"} <= step.metrics.keys()
    )


@pytest.mark.parametrize(("fraction", "number"), [(1e-6, 1), (0.3, 1), (0.5, 2), (0.75, 3)])
def test_clip_cov_draws_a_share_of_the_step_and_at_least_one(fraction: float, number: int) -> None:
    drawn = prepared(ClipCov(fraction=fraction, cov_low=0.0), view_of(CURRENT, **COVARIANCE))
    assert sum(drawn[0]) == number


@pytest.mark.parametrize(
    ("gaps", "threshold", "kept"),
    [
        pytest.param([0.1, 0.2, 0.3, 0.6], 0.04, [True, True, False, False], id="smallest-while-the-mean-is-below"),
        pytest.param([0.6, -0.1, 0.3, -0.2], 0.04, [False, True, False, True], id="in-any-order-and-of-any-sign"),
        pytest.param([0.5, 0.6, 0.7, 0.8], 0.04, [True, False, False, False], id="at-least-one"),
        pytest.param([0.1, 0.1, 0.1, 0.1], 0.04, [True] * 4, id="all"),
        pytest.param([0.0, 0.25, 0.25, 0.25], 0.04, [True] * 4, id="ties-at-the-bound"),
        pytest.param([0.0, 0.0, 0.0, 9.0], math.inf, [True] * 4, id="no-threshold"),
    ],
)
def test_m2po_keeps_the_smallest_squared_gaps(gaps: list[float], threshold: float, kept: list[bool]) -> None:
    old = [-2.0] * 4
    rollout = [-2.0 - gap for gap in gaps]
    view = view_of([-1.9] * 4, old_logprobs=old, rollout_logprobs=rollout, dtype=torch.float64)
    assert prepared(M2PO(threshold=threshold), view) == [kept]
    step = run_step(view, loss=M2PO(threshold=threshold))
    assert step.metrics["policy/kept"] == sum(kept) / 4
    assert step.gradient[0].tolist() == pytest.approx([-math.exp(0.1) / 4 * keep for keep in kept])  # of all four
