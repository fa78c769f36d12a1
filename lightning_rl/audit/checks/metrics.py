"""Checks of what is logged: raw KL from untouched inputs, populations before rejection, sizes of weights."""

from collections.abc import Iterator

import torch

from lightning_rl import algorithm
from lightning_rl.audit.checks.check import check
from lightning_rl.audit.checks.signal import POISON_TEXT, poison
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.figures import kl_values
from lightning_rl.audit.finding import NO_ROWS, Skip
from lightning_rl.corrections import LossView, RLCallback
from lightning_rl.finding import Finding

MIN_ESS = 0.02
FEW_TOKENS, ALONE = 8, 1.5  # so few tokens cannot fall below the floor: then it is the number that counts


@check(cure="measure from untouched log-probabilities and valid_tokens, never from a shaped reward")
def raw_kl(evidence: Evidence) -> Iterator[Finding | Skip]:
    """The KL metrics are those of the untouched log-probabilities, over the valid tokens and nothing else."""
    view = evidence.view(drift=1.0).sanitize()
    stats, number = algorithm.policy_metrics(view), int(view.valid_tokens.sum())
    if not number:
        yield Skip(NO_ROWS)
    for name, values in kl_values(view, view.logprobs).items():
        truth = float(values[view.valid_tokens].mean()) if number else 0.0
        count, mean = stats[name].moments[:2].tolist() if name in stats else [0.0, 0.0]
        if abs(mean - truth) > 1e-4 * max(1.0, abs(truth)) or count != number:
            expected, observed = f"{truth:.6g} over {number} tokens", f"{mean:.6g} over {count:.0f}"
            yield Finding(culprit=f"metric {name}", expected=expected, observed=observed)


@check(cure="Stat.of(values, view.valid_tokens), never a mask that the correction has narrowed")
def metric_populations(evidence: Evidence) -> Iterator[Finding]:
    """A correction measures what was there before it rejected anything, and no masked value; a subset of tokens that it
    does not reject is its own business.
    """
    view, poisoned_view = evidence.view().sanitize(), evidence.view(poison(evidence.rows))
    whole = {int(mask.sum()) for mask in (view.valid_tokens, view.trained, view.real)}
    for contribution in evidence.contributions("metrics"):
        plain, others = ({name: stat.moments for name, stat in contribution(v).items()} for v in (view, poisoned_view))
        kept = _sizes_after_masks(contribution.callback, evidence, view)
        problems = [
            (name, f"a population of {count}")
            for name, count in ((name, int(moments[0])) for name, moments in plain.items())
            if count not in whole and (count in kept or count > max(whole))
        ]
        problems += [
            (name, f"a value that moves with {POISON_TEXT}")
            for name, moments in others.items()
            if not torch.allclose(plain[name], moments, rtol=1e-6, atol=1e-9, equal_nan=True)
        ]
        for name, observed in problems[:1]:
            expected = f"{name} over all valid tokens or trained rows, before rejection"
            yield Finding(culprit=str(contribution), expected=expected, observed=observed)
            return


def _sizes_after_masks(callback: RLCallback, evidence: Evidence, view: LossView) -> set[int]:
    """How many tokens and rows the masks of a callback keep, each alone."""
    numbers = set[int]()
    for contribution in evidence.contributions("sequence_mask", "token_mask"):
        if contribution.callback is callback:
            mask = contribution(view)
            rows = mask if mask.dim() == 1 else (mask & view.valid_tokens).any(-1)
            tokens = view.valid_tokens & (mask[:, None] if mask.dim() == 1 else mask)
            numbers |= {int(tokens.sum()), int((rows & view.trained).sum())}
    return numbers


@check(
    expected=f"weights >= 0 with an effective share of samples above {MIN_ESS}",
    cure="bound the weights, or find out why engine and trainer are so far apart",
)
def weights_keep_samples(evidence: Evidence) -> Iterator[Finding]:
    """Importance weights leave an effective share of the tokens that is worth training on, and are never negative."""
    view = evidence.view(drift=0.0).sanitize()
    for contribution in evidence.contributions("token_weight"):
        weight = contribution(view)[view.valid_tokens].double()
        if not len(weight):
            continue
        share = float(weight.sum() ** 2 / (len(weight) * weight.square().sum()).clamp(min=1e-300))
        alone = len(weight) >= FEW_TOKENS and share * len(weight) < ALONE
        if share < MIN_ESS or alone or bool((weight < 0).any()):
            yield Finding(culprit=str(contribution), observed=f"a share of {share:.3g}")
