"""Checks of metrics of corrections: populations before rejection, effective sample sizes."""

from collections.abc import Callable, Iterator, Mapping

import torch

from lightning_rl.corrections import LossView, RLCallback, Stat
from lightning_rl.testing.properties.case import AlgorithmCase
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.definitions import is_figure, merge
from lightning_rl.testing.properties.signal_checks import POISON_TEXT, poison
from lightning_rl.utils.finding import Finding

MIN_ESS = 0.02
ALONE_ROWS = 3  # number of microbatches with a single row
FEW_TOKENS, ALONE = 8, 1.5  # for few tokens the effective number counts, not the share


@check(cure="Stat.of(values, view.valid_tokens), neither a mask narrowed by the correction nor a precomputed mean")
def metric_populations(case: AlgorithmCase) -> Iterator[Finding]:
    """Metrics of corrections cover the tokens before rejection and no masked values; custom subsets are allowed.

    Merged over microbatches, metrics of corrections and loss do not depend on the partition or order of rows.
    """
    yield from _moving_with_cuts(case)
    view, poisoned_view = case.view().sanitize(), case.view(poison(case.rows))
    whole = {int(mask.sum()) for mask in (view.valid_tokens, view.trained, view.real)}
    for contribution in case.contributions("metrics"):
        plain, others = ({name: stat.moments for name, stat in contribution(v).items()} for v in (view, poisoned_view))
        kept = _sizes_after_masks(contribution.callback, case, view)
        problems = [
            (name, f"a population of {count}")
            for name, count in ((name, int(moments[0])) for name, moments in plain.items())
            if count not in whole and (count in kept or count > max(whole))
        ]
        problems += [
            (name, f"a value that changes with {POISON_TEXT}")
            for name, moments in others.items()
            if not torch.allclose(plain[name], moments, rtol=1e-6, atol=1e-9, equal_nan=True)
        ]
        for name, observed in problems[:1]:
            expected = f"{name} over all valid tokens or trained rows, before rejection"
            yield Finding(culprit=str(contribution), expected=expected, observed=observed)
            return


def _moving_with_cuts(case: AlgorithmCase) -> Iterator[Finding]:
    """Yield a finding for metrics that depend on the partition into microbatches or on the order of rows."""
    view = case.prepare(case.view().sanitize())
    rows = range(len(view))
    single = [[row] for row in rows[:ALONE_ROWS]]
    cuts = [[*single, list(rows[ALONE_ROWS:])], [list(reversed(rows))]] if len(rows) > 1 else []
    for culprit, measure in _measures(case):
        whole = measure(view)
        for name, (cut, stat) in _first_changes(measure, view, whole, cuts).items():
            expected = f"{name} = {whole[name].value():.6g}, for every partition into microbatches"
            partition = "with single rows" if len(cut) > 1 else "in the reverse order"
            yield Finding(culprit=culprit, expected=expected, observed=f"{stat.value():.6g} {partition}")
            return
    groups = case.groups
    turned = groups.select(torch.arange(len(groups) - 1, -1, -1, device=groups.groups.device))
    for contribution in case.contributions("rollout_metrics"):
        whole, others = contribution(groups), contribution(turned)
        for name in [name for name, stat in whole.items() if name not in others or not _alike(stat, others[name])][:1]:
            yield Finding(culprit=str(contribution), expected=f"{name} independent of the order of rows")


Measure = Callable[[LossView], Mapping[str, Stat]]


def _measures(case: AlgorithmCase) -> Iterator[tuple[str, Measure]]:
    """Yield the functions that measure a microbatch, with their culprits."""
    for contribution in case.contributions("metrics"):
        yield str(contribution), contribution
    yield f"loss {case.names['loss']}", case.algorithm.loss.metrics


def _first_changes(
    measure: Measure, view: LossView, whole: Mapping[str, Stat], cuts: list[list[list[int]]]
) -> dict[str, tuple[list[list[int]], Stat]]:
    """Return the metrics that another partition changes, with the first such partition and the new value."""
    changes = dict[str, tuple[list[list[int]], Stat]]()
    for cut in cuts if whole else []:
        joint = merge(measure(_microbatch(view, part)) for part in cut if part)
        for name, stat in whole.items():
            if name in joint and not _alike(stat, joint[name]):
                changes.setdefault(name, (cut, joint[name]))
    return changes


def _microbatch(view: LossView, rows: list[int]) -> LossView:
    index = torch.tensor(rows, device=view.groups.device)
    return view.select(index, width=max(1, int(view.response_lengths[index].max())))


def _alike(one: Stat, other: Stat) -> bool:
    """Return True if two statistics have the same value up to rounding."""
    return is_figure(other.value(), Stat(one.moments.cpu(), one.reduction))


def _sizes_after_masks(callback: RLCallback, case: AlgorithmCase, view: LossView) -> set[int]:
    """Return the number of tokens and rows that each mask of a callback keeps."""
    numbers = set[int]()
    for contribution in case.contributions("sequence_mask", "token_mask"):
        if contribution.callback is callback:
            mask = contribution(view)
            rows = mask if mask.dim() == 1 else (mask & view.valid_tokens).any(-1)
            tokens = view.valid_tokens & (mask[:, None] if mask.dim() == 1 else mask)
            numbers |= {int(tokens.sum()), int((rows & view.trained).sum())}
    return numbers


@check(
    cure="bound the weights, or find out why engine and trainer differ",
)
def weights_keep_samples(case: AlgorithmCase) -> Iterator[Finding]:
    """Weights are not negative and leave a sufficient effective share of tokens; importance weights do not collapse."""
    view = case.view(drift=0.0).sanitize()
    for contribution in case.contributions("token_weight"):
        weight = contribution(view)[view.valid_tokens].double()
        if not len(weight):
            continue
        share = float(weight.sum() ** 2 / (len(weight) * weight.square().sum()).clamp(min=1e-300))
        least = max(MIN_ESS, ALONE / len(weight)) if len(weight) >= FEW_TOKENS else MIN_ESS
        mean, ratio = float(weight.mean()), contribution.callback.ratio is not None
        problems = {
            ("weights >= 0", f"{float(weight.min()):.3g}"): bool((weight < 0).any()),
            (f"a mean weight above {MIN_ESS}", f"{mean:.3g}"): ratio and mean < MIN_ESS,
            (f"an effective share of {len(weight)} tokens above {least:.3g}", f"{share:.3g}"): share < least,
        }
        for (expected, observed), violated in problems.items():
            if violated:
                yield Finding(culprit=str(contribution), expected=expected, observed=observed)
                break
