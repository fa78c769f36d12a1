"""Checks of what is logged: raw KL from untouched inputs, populations before rejection, sizes of weights."""

import torch
from torch import Tensor

from lightning_rl import algorithm
from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.checks.signal import POISONS, poisoned
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding
from lightning_rl.corrections import LossView, Stat

ESS_FLOOR = 0.02
FEW_TOKENS, ALONE = 8, 1.5  # so few tokens cannot fall below the floor: then it is the number that counts


@check("raw_kl")
def raw_kl(evidence: Evidence) -> list[Finding]:
    """The KL metrics are those of the untouched log-probabilities, over the valid tokens and nothing else."""
    view, found = evidence.view(drift=1.0).sanitize(), []
    stats = algorithm.policy_metrics(view)
    for name, expected in _expected(view).items():
        moments = stats[name].moments.tolist() if name in stats else [0.0, 0.0]
        truth, number = expected
        if abs(moments[1] - truth) > 1e-4 * max(1.0, abs(truth)) or moments[0] != number:
            found.append(
                Finding(
                    check="raw_kl", culprit=f"metric {name}", expected=f"{truth:.6g} over {number} tokens",
                    observed=f"{moments[1]:.6g} over {moments[0]:.0f}", samples=view.sample_ids[:2].tolist(),
                    cure="measure from untouched log-probabilities and valid_tokens, never from a shaped reward",
                )
            )  # fmt: skip
    return found


def _expected(view: LossView) -> dict[str, tuple[float, int]]:
    valid, logprobs = view.valid_tokens, view.logprobs.detach().double()
    number = int(valid.sum())

    def mean(values: Tensor) -> tuple[float, int]:
        return float(values[valid].mean()) if number else 0.0, number

    found = {}
    if view.ref_logprobs is not None:
        found["kl/ref"] = mean(logprobs - view.ref_logprobs.double())
    for name, other in (("kl/rollout", view.rollout_logprobs), ("kl/old", view.old_logprobs)):
        if other is not None:
            gap = logprobs - other.double()
            found[name] = mean(gap.exp() - 1 - gap)
    return found


def _populations(view: LossView) -> set[int]:
    return {int(view.valid_tokens.sum()), int(view.trained.sum()), int(view.real.sum())}


@check("metric_populations")
def metric_populations(evidence: Evidence) -> list[Finding]:
    """A correction measures all valid tokens or all trained rows, before anything is rejected, and no masked value."""
    found, view = [], evidence.view().sanitize()
    for callback in evidence.subject.contributions.contributors("metrics"):
        for name, stat in callback.metrics(view).items():
            if int(stat.moments[0]) not in _populations(view):
                found.append((callback.name, name, f"a population of {int(stat.moments[0])}"))
        ours = callback.metrics(view)
        theirs = callback.metrics(evidence.view(poisoned(evidence.rows)))
        found += [
            (callback.name, name, f"a value that moves with {POISONS}")
            for name, stat in theirs.items()
            if not _same(stat, ours[name])
        ]
    return [
        Finding(
            check="metric_populations", culprit=f"callback {callback}.metrics", observed=observed,
            expected=f"{name} over all valid tokens or trained rows, before rejection",
            cure="Stat.of(values, view.valid_tokens), never a mask that the correction has narrowed",
        )
        for callback, name, observed in found[:1]
    ]  # fmt: skip


def _same(ours: Stat, theirs: Stat) -> bool:
    return bool(torch.allclose(ours.moments, theirs.moments, rtol=1e-6, atol=1e-9, equal_nan=True))


@check("weights_keep_samples")
def weights_keep_samples(evidence: Evidence) -> list[Finding]:
    """Importance weights leave an effective share of the tokens that is worth training on, and are never negative."""
    found, rollout = [], evidence.rows
    view = evidence.view(drift=0.0).sanitize()
    for callback in evidence.subject.contributions.contributors("token_weight"):
        weight = callback.token_weight(view)[view.valid_tokens].double()
        if not len(weight):
            continue
        share = float(weight.sum() ** 2 / (len(weight) * weight.square().sum()).clamp(min=1e-300))
        alone = len(weight) >= FEW_TOKENS and share * len(weight) < ALONE
        if share < ESS_FLOOR or alone or bool((weight < 0).any()):
            found.append(
                Finding(
                    check="weights_keep_samples", culprit=f"callback {callback.name}.token_weight",
                    expected=f"weights >= 0 with an effective share of samples above {ESS_FLOOR}",
                    observed=f"a share of {share:.3g}", samples=rollout.sample_ids[:2].tolist(),
                    cure="bound the weights, or find out why engine and trainer are so far apart",
                )
            )  # fmt: skip
    return found
