"""Checks of contributions and losses: shape and type, repeatability, equality over ranks, no edits of arguments."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lightning_rl.corrections.call_user import PURE
from lightning_rl.rollout import Rollout
from lightning_rl.testing.properties.case import SHOWN_A_ROLLOUT, SHOWN_A_VIEW, AlgorithmCase
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.copies import with_numbers_of_others
from lightning_rl.testing.properties.row_changes import alike, repeats_itself
from lightning_rl.testing.properties.value_guard import Seal
from lightning_rl.utils.finding import Finding

COMBINED = ("policy_factor", "loss_terms", "metrics")


@check(
    expected="the same contribution to the same rows",
    observed="another one in a repeated call",
    cure="draw no random numbers, and depend only on the argument and on load_state_dict",
)
def contributions_fit(case: AlgorithmCase) -> Iterator[Finding]:
    """Contributions have the required shape and type, log under their own name, are repeatable and edit no argument."""
    early, late = case.groups.sanitize(), case.view().sanitize()
    for method in (*SHOWN_A_ROLLOUT, *COMBINED):  # the core validates shape and type
        getattr(case.algorithm.corrections, method)(early if method in SHOWN_A_ROLLOUT else late)
    for contribution in case.contributions(*SHOWN_A_ROLLOUT, *SHOWN_A_VIEW):
        if contribution.method == "rollout_metrics" and not contribution.callback.affects:
            continue  # it may measure something else than the rollout, such as time
        shown = early if contribution.method in SHOWN_A_ROLLOUT else late
        if edits := edits_of(contribution, shown):
            yield Finding(culprit=str(contribution), observed=f"edits of {', '.join(edits)}", cure=PURE)
        elif not repeats_itself(contribution, shown):
            yield Finding(culprit=str(contribution), samples=shown.sample_ids[:2].tolist())


def edits_of(function: Callable[[Any], object], shown: Rollout) -> list[str]:
    """Return the fields of its argument that a function edits."""
    seal = Seal(shown.tensors())
    function(shown)
    return seal.changes(shown.tensors())


@check(
    expected="the same contribution with the numbers that any rank stores",
    observed="another one with the numbers of another rank",
    cure="adapt to statistics of all ranks: self.collectives.sum",
)
def contributions_agree(case: AlgorithmCase) -> Iterator[Finding]:
    """Numbers that a correction stores and uses, such as an adaptive coefficient, are the same on all ranks."""
    early, late = case.groups.sanitize(), case.view().sanitize()
    for callback in case.algorithm.corrections.callbacks:
        numbers = [rank[callback.name] for rank in case.numbers if callback.name in rank]
        for twin in with_numbers_of_others(callback, numbers):
            for contribution in case.contributions(*SHOWN_A_ROLLOUT, *SHOWN_A_VIEW):
                measures = contribution.method in ("rollout_metrics", "metrics")
                if contribution.callback is not callback or measures:
                    continue
                shown = early if contribution.method in SHOWN_A_ROLLOUT else late
                if not alike(contribution.tensors(shown), contribution._replace(callback=twin).tensors(shown)):
                    yield Finding(culprit=str(contribution), samples=shown.sample_ids[:2].tolist())
                    return


@check(culprit="loss {loss}", cure="return a new tensor [b, T]; the core applies masks and means")
def loss_fits(case: AlgorithmCase) -> Iterator[Finding]:
    """The policy loss returns one number per token and edits none of its arguments."""
    view = case.prepare(case.view().sanitize())
    edits, per_token = edits_of(case.algorithm.loss, view), case.algorithm.loss(view)
    if not isinstance(per_token, Tensor) or per_token.shape != view.valid_tokens.shape:
        observed = list(per_token.shape) if isinstance(per_token, Tensor) else type(per_token).__name__
        yield Finding(expected=f"a value per token {list(view.valid_tokens.shape)}", observed=str(observed))
    if edits:
        yield Finding(expected="an unmodified view", observed=f"edits of {', '.join(edits)}")
