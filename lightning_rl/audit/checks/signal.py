"""Checks of rewards and advantages: the signal stage is repeated on changed copies of a few whole groups."""

import dataclasses
import math

import torch
from torch import Tensor

from lightning_rl.audit.checks.registry import check
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.finding import Finding, differing
from lightning_rl.rollout import Rollout

POISON = (math.nan, math.inf, -math.inf, 1e6)
POISONS = "NaN, infinity and a million at masked tokens"


def looks_within_groups(evidence: Evidence) -> bool:
    """Whether estimator and bonuses look at one group at a time."""
    bonuses = evidence.subject.contributions.contributors("reward_bonus")
    return evidence.subject.estimator.within_groups and not any(callback.compares_rows for callback in bonuses)


def culprit_of(evidence: Evidence, plain: Rollout, changed: Rollout) -> str:
    """Who made the signal differ: a correction whose own part differs, or the estimator."""
    for callback, method in evidence.subject.contributors("token_reward", "reward_bonus"):
        one, other = getattr(callback, method)(plain.sanitize()), getattr(callback, method)(changed.sanitize())
        kept = plain.valid_tokens if one.dim() == 2 else plain.rewarded
        if not torch.allclose(one[kept].double(), other[kept].double(), rtol=1e-4, atol=1e-6, equal_nan=True):
            return f"callback {callback.name}.{method}"
    return f"estimator {evidence.subject.estimator.name}"


def unchanged(
    evidence: Evidence, name: str, changed: Rollout, kept: Tensor, *, expected: str, cure: str
) -> list[Finding]:
    """Compares the advantages of a changed copy with those of the original, at ``kept`` rows [B]."""
    plain = evidence.groups
    ours = evidence.own_signal.required("advantages")
    try:
        theirs = evidence.signal(changed)[0].required("advantages")
    except ValueError as refused:  # what must not count was not finite, and somebody read it
        rows = plain.sample_ids[:4].tolist()
        culprit = culprit_of(evidence, plain, changed)
        return [Finding(check=name, culprit=culprit, expected=expected, observed=str(refused), cure=cure, samples=rows)]
    samples, positions = differing(
        torch.where(kept[:, None], ours, 0.0), torch.where(kept[:, None], theirs, 0.0), plain.sample_ids
    )
    if not samples:
        return []
    return [
        Finding(
            check=name, culprit=culprit_of(evidence, plain, changed), expected=expected, cure=cure, samples=samples,
            positions=positions, observed=f"advantages that moved by up to {float((ours - theirs).abs().max()):.3g}",
        )
    ]  # fmt: skip


def poisoned(rollout: Rollout) -> Rollout:
    """A copy with each of :data:`POISON` in turn at the tokens that are not valid, of every float field."""
    valid = rollout.valid_tokens
    place = torch.arange(valid.numel(), device=valid.device).reshape(valid.shape) % len(POISON)

    def at_invalid(tensor: Tensor, axes: str, _pad: float) -> Tensor:
        if axes != "token" or not tensor.is_floating_point():
            return tensor
        poison = tensor.new_tensor(POISON)[place]
        shape = (*valid.shape, *[1] * (tensor.dim() - 2))
        return torch.where(valid.reshape(shape), tensor, poison.reshape(shape))

    return rollout.map(at_invalid)


@check("masked_values")
def masked_values(evidence: Evidence) -> list[Finding]:
    """What stands at a token that is not valid, NaN and infinity too, reaches no advantage."""
    return unchanged(
        evidence, "masked_values", poisoned(evidence.groups), torch.ones_like(evidence.groups.trained),
        expected=f"the same advantages with {POISONS}",
        cure="select by valid_tokens before any arithmetic: torch.where(mask, x, 0), not x * mask",
    )  # fmt: skip


@check("excluded_rows")
def excluded_rows(evidence: Evidence) -> list[Finding]:
    """The reward of a row that is not rewarded (cut off, failed, excluded) moves nobody else's advantage."""
    rollout = evidence.groups
    if bool(rollout.rewarded.all()) and len(rollout):  # nobody is left out here: leave out one row of each group
        first = torch.zeros_like(rollout.rewarded)
        for group in rollout.groups.unique():
            first[(rollout.groups == group).nonzero()[0, 0]] = True
        rollout = rollout.replace(rewarded=rollout.rewarded & ~first)
    own = dataclasses.replace(evidence, groups=rollout)
    outlier = torch.where(torch.arange(len(rollout), device=rollout.groups.device) % 2 == 0, 1e4, math.nan)
    changed = torch.where(rollout.rewarded, rollout.rewards, outlier.to(rollout.rewards.dtype))
    found = unchanged(
        own, "excluded_rows", rollout.replace(rewards=changed), torch.ones_like(rollout.trained),
        expected="advantages without a trace of rows outside `rewarded`",
        cure="take means and deviations over `rewarded` rows alone",
    )  # fmt: skip
    if not found and looks_within_groups(evidence) and bool(rollout.rewarded.any()):
        ours = own.own_signal.required("advantages")[rollout.rewarded]
        theirs = evidence.signal(rollout.select(rollout.rewarded))[0].required("advantages")
        samples, positions = differing(ours, theirs, rollout.sample_ids[rollout.rewarded])
        found += [
            Finding(
                check="excluded_rows", culprit=f"estimator {evidence.subject.estimator.name}", samples=samples,
                expected="the advantages that there would be without the rows outside `rewarded`", observed="others",
                positions=positions, cure="count `rewarded` rows alone in every mean and deviation",
            )
        ][: len(samples)]  # fmt: skip
    return found[:1]


@check("padding_width")
def padding_width(evidence: Evidence) -> list[Finding]:
    """More padding behind the responses changes no advantage."""
    rollout, wider = evidence.groups, evidence.groups.fit_width(evidence.groups.width + 3)
    ours = evidence.own_signal.required("advantages")
    theirs = evidence.signal(wider)[0].required("advantages")
    samples, positions = differing(ours, theirs[:, : rollout.width], rollout.sample_ids)
    return [
        Finding(
            check="padding_width", culprit=f"estimator {evidence.subject.estimator.name}", observed="others",
            expected="the same advantages with three more positions of padding", samples=samples, positions=positions,
            cure="count `valid_tokens`, never columns, and take the last valid token for the end",
        )
    ][: len(samples)]  # fmt: skip


@check("group_isolation")
def group_isolation(evidence: Evidence) -> list[Finding]:
    """Rewards of one prompt's samples move no advantage of another prompt."""
    rollout = evidence.groups
    if not looks_within_groups(evidence) or len(rollout.groups.unique()) < 2:
        return []
    other = rollout.groups != rollout.groups[0]
    noise = 3.7 * torch.sin(1.0 + rollout.sample_ids).to(rollout.rewards.dtype)
    changed = rollout.replace(rewards=torch.where(other, rollout.rewards + noise, rollout.rewards))
    return unchanged(
        evidence, "group_isolation", changed, ~other, expected="advantages that depend on their own group alone",
        cure="group by `groups`, never by position or a fixed group size",
    )  # fmt: skip


@check("reward_shift")
def reward_shift(evidence: Evidence) -> list[Finding]:
    """A constant added to all rewards of a group changes no advantage, where the estimator subtracts a mean."""
    rollout = evidence.groups
    if not evidence.subject.estimator.shift_invariant or not looks_within_groups(evidence):
        return []
    offset = 1.0 + (rollout.groups % 7).to(rollout.rewards.dtype)
    return unchanged(
        evidence, "reward_shift", rollout.replace(rewards=rollout.rewards + offset), torch.ones_like(rollout.trained),
        expected="advantages that do not see a constant added to a group", cure="subtract the mean of the whole group",
    )  # fmt: skip


@check("row_order")
def row_order(evidence: Evidence) -> list[Finding]:
    """Rows in another order have the same advantages: nothing is joined by position."""
    rollout = evidence.groups
    order = torch.sin(1.0 + 7.0 * torch.arange(len(rollout), device=rollout.groups.device)).argsort()
    ours = evidence.own_signal.required("advantages")
    theirs = torch.empty_like(ours)
    theirs[order] = evidence.signal(rollout.select(order))[0].required("advantages")
    samples, positions = differing(ours, theirs, rollout.sample_ids)
    culprit = culprit_of(evidence, rollout, rollout.select(order).select(order.argsort()))
    return [
        Finding(
            check="row_order", culprit=culprit, expected="the same advantages for rows in another order",
            observed="others", samples=samples, positions=positions, cure="join by sample_ids and groups",
        )
    ][: len(samples)]  # fmt: skip


@check("advantage_support")
def advantage_support(evidence: Evidence) -> list[Finding]:
    """Advantages are 0 outside the valid tokens; one scalar for a row is the same at all of its valid tokens."""
    rollout, advantages = evidence.rollout, evidence.rollout.required("advantages")
    outside = torch.where(rollout.valid_tokens, 0.0, advantages)
    found = []
    samples, positions = differing(outside, torch.zeros_like(outside), rollout.sample_ids)
    if samples:
        found.append(("0 at every token that is not valid", "something else", samples, positions))
    if not evidence.subject.estimator.per_token:
        low = torch.where(rollout.valid_tokens, advantages, torch.inf).amin(-1)
        high = torch.where(rollout.valid_tokens, advantages, -torch.inf).amax(-1)
        rows = (high - low > 1e-6) & rollout.valid_tokens.any(-1)
        if rows.any():
            ids = rollout.sample_ids[rows][:4].tolist()
            found.append(("one advantage at all valid tokens of a row", "advantages that differ", ids, []))
    culprit = f"estimator {evidence.subject.estimator.name}"
    return [
        Finding(
            check="advantage_support", culprit=culprit, expected=expected, observed=observed, samples=samples,
            positions=positions, cure="spread an advantage over `valid_tokens` and nowhere else",
        )
        for expected, observed, samples, positions in found
    ]  # fmt: skip


@check("pure_contributions")
def pure_contributions(evidence: Evidence) -> list[Finding]:
    """A contribution edits nothing that it is shown, by whatever way: its argument is compared before and after."""
    found, methods = [], ("reward_mask", "reward_bonus", "exclude", "token_reward", "rollout_metrics")
    late = ("sequence_mask", "token_mask", "token_weight", "loss_term", "metrics")
    for callback, method in evidence.subject.contributors(*methods, *late):
        seen = (evidence.groups if method in methods else evidence.view()).sanitize()
        copies = {name: tensor.detach().clone() for name, tensor in seen.tensors()}
        getattr(callback, method)(seen)
        edited = [name for name, tensor in seen.tensors() if not torch.equal(_plain(tensor), _plain(copies[name]))]
        if edited:
            found.append(
                Finding(
                    check="pure_contributions", culprit=f"callback {callback.name}.{method}",
                    expected="the same values before and after", observed=f"edits of {', '.join(edited)}",
                    cure="return a new tensor (x * y, not x *= y)", samples=seen.sample_ids[:2].tolist(),
                )
            )  # fmt: skip
    return found


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().nan_to_num() if tensor.is_floating_point() else tensor


@check("advantages_are_those_of_the_stage")
def recomputed(evidence: Evidence) -> list[Finding]:
    """The advantages that train are what the signal stage makes of the untouched raw fields, on one rank."""
    if not looks_within_groups(evidence):
        return []
    rollout = evidence.groups
    samples, positions = differing(
        rollout.required("advantages"), evidence.own_signal.required("advantages"), rollout.sample_ids
    )
    return [
        Finding(
            check="advantages_are_those_of_the_stage", culprit="stage signal, or whoever edited its result",
            expected="the advantages of the raw rewards", observed="others", samples=samples, positions=positions,
            cure="return new tensors from every contribution, and keep no reference to edit later",
        )
    ][: len(samples)]  # fmt: skip


@check("reward_conservation")
def reward_conservation(evidence: Evidence) -> list[Finding]:
    """Over the valid tokens of a row the shaped reward adds up to its score and its token rewards: nothing is lost at a
    masked token, nothing counts twice.
    """
    rollout = evidence.groups.sanitize()
    seen = evidence.seen_signal
    scores = torch.where(rollout.rewarded, rollout.rewards, 0.0).double()
    tokens = torch.zeros_like(seen.shaped).double()
    for callback, method in evidence.subject.contributors("reward_bonus", "token_reward"):
        given = getattr(callback, method)(rollout).double()
        scores, tokens = (scores + given, tokens) if method == "reward_bonus" else (scores, tokens + given)
    expected = torch.where(rollout.valid_tokens.any(-1), scores, 0.0)
    expected = expected + torch.where(rollout.valid_tokens, tokens, 0.0).sum(-1)
    samples, _ = differing(seen.shaped.double().sum(-1), expected, rollout.sample_ids, atol=1e-5)
    return [
        Finding(
            check="reward_conservation", culprit="stage signal, the shaped reward", samples=samples,
            expected="shaped rewards that add up to the score and the token rewards of their row", observed="others",
            cure="place the score at the last valid token, and build the shaped reward out of place",
        )
    ][: len(samples)]  # fmt: skip
