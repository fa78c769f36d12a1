"""Checks of rewards and advantages: the signal stage repeated on changed copies of a few whole groups."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightning_rl.advantages import RowEstimator
from lightning_rl.corrections import REWARDS, TOKEN_REWARDS
from lightning_rl.rollout import TOKEN, Rollout
from lightning_rl.testing.properties.case import AlgorithmCase
from lightning_rl.testing.properties.check import ESTIMATOR, check
from lightning_rl.testing.properties.comparisons import bitwise_equal, differences, rounding
from lightning_rl.testing.properties.definitions import shaped_parts
from lightning_rl.testing.properties.row_changes import Change, moved_rows
from lightning_rl.utils.finding import Finding

POISONS = (math.nan, math.inf, -math.inf, 1e6)
MIN_TOKENS = 2  # of the longest response, for it to become shorter
POISON_TEXT = "NaN, infinity and a million at masked tokens"


def looks_within_groups(case: AlgorithmCase) -> bool:
    """Return True if estimator and rewards of corrections use one group at a time."""
    rewards = case.contributions(*REWARDS)
    return case.algorithm.advantages.within_groups and not any(one.compares_prompts for one in rewards)


def poison(rollout: Rollout) -> Rollout:
    """Return a copy with :data:`POISONS` at the tokens that are not valid, in every float field."""
    valid = rollout.valid_tokens
    place = torch.arange(valid.numel(), device=valid.device).reshape(valid.shape) % len(POISONS)

    def at_invalid(tensor: Tensor, axis: object, _pad: float) -> Tensor:
        if axis != TOKEN or not tensor.is_floating_point():
            return tensor
        shape = (*valid.shape, *[1] * (tensor.dim() - 2))
        return torch.where(valid.reshape(shape), tensor, tensor.new_tensor(POISONS)[place].reshape(shape))

    return rollout.map(at_invalid)


def advantage_changes(
    case: AlgorithmCase, changed: Rollout, rows: Tensor | None = None, order: Tensor | None = None
) -> Iterator[Finding]:
    """Yield a finding if a changed copy of the groups, or of some of their rows, has other advantages.

    Args:
        case: AlgorithmCase with the groups.
        changed: Changed copy.
        rows: Rows of the groups to compare, [B] bool; by default all.
        order: Indices of the copy's rows in the groups, [b]; by default the same order.
    """
    plain = case.groups
    order = torch.arange(len(plain), device=plain.groups.device) if order is None else order
    change, sample_ids, ours = Change("", changed, order), plain.sample_ids[order], case.advantages[order]
    try:
        theirs = case.advantages_of(changed)[:, : plain.width]
    except ValueError as refused:  # a part of the algorithm reads invalid values
        yield Finding(culprit=_culprit_of(case, change), observed=str(refused), samples=sample_ids[:4].tolist())
        return
    kept = torch.ones_like(ours, dtype=torch.bool) if rows is None else rows[order, None]
    pair = torch.where(kept, ours, 0.0), torch.where(kept, theirs, 0.0)
    rewards = plain.replace(rewards=plain.rewards.index_copy(0, order, changed.rewards))
    atol = signal_rounding(plain, rewards, case.advantages)[order]
    for finding in differences(*pair, sample_ids, atol=atol):
        observed = f"advantages that change by up to {float((ours - theirs).abs().max()):.3g}"
        yield replace(finding, culprit=_culprit_of(case, change), observed=observed)


def signal_rounding(plain: Rollout, changed: Rollout, advantages: Tensor) -> Tensor:
    """Return the tolerance for rounding of the advantages of each row, [B, 1].

    An advantage is a difference of rewards over a deviation, so the rounding of the largest reward is multiplied by the
    largest advantage of its group over the group's spread.
    """
    same = plain.groups[:, None] == plain.groups[None]
    both = torch.stack([plain.rewards, changed.rewards]).double()
    size = torch.where(plain.rewarded, both.nan_to_num(0.0, 0.0, 0.0).abs(), 0.0).amax(0)
    scores = torch.where(plain.rewarded, plain.rewards.double().nan_to_num(), torch.nan)
    high = torch.where(same, scores.nan_to_num(-torch.inf), -torch.inf).amax(-1)
    low = torch.where(same, scores.nan_to_num(torch.inf), torch.inf).amin(-1)
    everywhere = (high.amax(-1) - low.amin(-1)).clamp(min=0.0) if len(high) else high
    spread = torch.where(high > low, high - low, torch.where(everywhere > 0, everywhere, torch.inf))
    size = torch.where(same, size, 0.0).amax(-1)
    largest = torch.where(same, advantages.double().abs().amax(-1), 0.0).amax(-1)
    scale = largest.amax() + largest * (size / spread)
    return rounding(plain.rewards.dtype, scale)[:, None]


def _culprit_of(case: AlgorithmCase, change: Change) -> str:
    """Return the correction whose contribution changed, else the estimator, as a culprit."""
    plain = case.groups.sanitize()
    clean = change._replace(rollout=change.rollout.sanitize())
    for contribution in case.contributions(*REWARDS):
        moved = moved_rows(contribution, plain, clean)
        if (moved & (plain.rewarded | (contribution.method in TOKEN_REWARDS))[change.rows]).any():
            return str(contribution)
    return ESTIMATOR.format(**case.names)


@check(
    expected=f"the same advantages with {POISON_TEXT}",
    cure="select by valid_tokens before any arithmetic: torch.where(mask, x, 0), not x * mask",
)
def masked_values(case: AlgorithmCase) -> Iterator[Finding]:
    """Values at tokens that are not valid, such as NaN, reach no advantage."""
    yield from advantage_changes(case, poison(case.groups))


@check(
    expected="advantages that do not depend on rows outside `rewarded`",
    cure="compute means and deviations over `rewarded` rows only",
)
def excluded_rows(case: AlgorithmCase) -> Iterator[Finding]:
    """The reward of a row that is not rewarded (truncated, failed, excluded) changes no advantage of other rows.

    An estimator with one advantage per row gives such a row 0.
    """
    rollout = case.groups
    if bool(rollout.rewarded.all()) and len(rollout):  # no row is left out here: leave out one row of each group
        first = torch.zeros_like(rollout.rewarded)
        for group in rollout.groups.unique():
            first[(rollout.groups == group).nonzero()[0, 0]] = True
        rollout = rollout.replace(rewarded=rollout.rewarded & ~first)
        case = replace(case, groups=rollout)
    rewarded = rollout.rewarded
    outliers = torch.where(torch.arange(len(rollout), device=rewarded.device) % 2 == 0, 1e4, math.nan)
    rewards = torch.where(rewarded, rollout.rewards, outliers.to(rollout.rewards.dtype))
    findings = list(advantage_changes(case, rollout.replace(rewards=rewards)))
    yield from findings
    left_out = ~rewarded & rollout.trained
    if isinstance(case.algorithm.advantages, RowEstimator) and bool((case.advantages[left_out] != 0).any()):
        yield Finding(
            culprit=ESTIMATOR.format(**case.names),
            expected="an advantage of 0 for rows outside `rewarded`",
            observed="another one",
            samples=rollout.sample_ids[left_out][:4].tolist(),
            cure="return 0 for rows outside `rewarded`",
        )
    if not findings and looks_within_groups(case) and bool(rewarded.any()):
        for finding in advantage_changes(case, rollout.select(rewarded), order=rewarded.nonzero()[:, 0]):
            yield replace(
                finding,
                expected="the advantages without the rows outside `rewarded`",
                cure="count only `rewarded` rows in every mean and deviation",
            )


@check(
    expected="the same advantages with three more positions of padding",
    cure="count `valid_tokens`, never columns, and use the last valid token as the end",
)
def padding_width(case: AlgorithmCase) -> Iterator[Finding]:
    """Additional padding after the responses changes no advantage, nor does the longest response, which sets its width.

    A statistic of the batch may count the tokens of all rows.
    """
    findings = list(advantage_changes(case, case.groups.fit_width(case.groups.width + 3)))
    yield from findings or _longest_response_changes(case)


def _longest_response_changes(case: AlgorithmCase) -> Iterator[Finding]:
    """Yield a finding if advantages of a group depend on the longest response of others, and on no shorter one."""
    plain, counts = case.groups, case.groups.valid_tokens.sum(-1)
    if not len(plain) or int(counts.max()) < MIN_TOKENS:
        return
    longest = counts.argmax()
    place, most = plain.valid_tokens.cumsum(-1), counts[longest]
    kept = plain.valid_tokens & (place < most)  # so that one response is the longest
    kept[longest] = plain.valid_tokens[longest]
    noise = 3.7 * torch.sin(1.0 + plain.sample_ids).to(
        plain.rewards.dtype
    )  # against statistics that are equal by chance
    case = replace(case, groups=plain.replace(valid_tokens=kept, rewards=plain.rewards + noise))
    heard = (case.advantages != 0).any(-1) & plain.rewarded
    apart = (heard & (plain.groups != plain.groups[longest])).nonzero()[:, 0]
    if not len(apart):
        return
    compared, counts = plain.groups == plain.groups[apart[0]], kept.sum(-1)
    others = heard & ~compared & (counts > 1)
    others[longest] = False
    shorter = case.groups.replace(valid_tokens=kept & ~(others[:, None] & (place == counts[:, None])))
    kept = kept.clone()
    kept[longest] &= place[longest] < most
    lower = case.groups.replace(valid_tokens=kept)
    if others.any() and bitwise_equal(case.advantages[compared], case.advantages_of(shorter)[compared]):
        for finding in advantage_changes(case, lower, compared):
            expected = "advantages that do not depend on the longest response of other groups"
            cure = "divide by a constant or by the row's own number of tokens, never by a maximum over the batch"
            yield replace(finding, expected=expected, cure=cure)


@check(
    expected="advantages that depend only on their own group",
    cure="group by `groups`, never by position or a fixed group size; to compare prompts on purpose, use a "
    "RowEstimator with within_groups = False, or batch_statistics = True of a correction",
)
def group_isolation(case: AlgorithmCase) -> Iterator[Finding]:
    """Other prompts change no advantage of a prompt: neither the rewards of their samples, nor their presence."""
    rollout = case.groups
    if looks_within_groups(case) and len(rollout.groups.unique()) > 1:
        longest = rollout.groups[rollout.valid_tokens.sum(-1).argmax()]
        first = rollout.groups == rollout.groups[rollout.groups != longest][0]
        noise = 3.7 * torch.sin(1.0 + rollout.sample_ids).to(rollout.rewards.dtype)
        rewards = torch.where(first, rollout.rewards, rollout.rewards + noise)
        findings = list(advantage_changes(case, rollout.replace(rewards=rewards), first))
        yield from findings or advantage_changes(case, rollout.select(first), order=first.nonzero()[:, 0])


@check(
    expected="advantages that do not depend on a constant added to a group", cure="subtract the mean of the whole group"
)
def reward_shift(case: AlgorithmCase) -> Iterator[Finding]:
    """A constant added to all rewards of a group changes no advantage.

    This applies if the estimator subtracts a mean and no bonus declares ``scales_rewards``.
    """
    rollout, algorithm = case.groups, case.algorithm
    scaled = any(callback.scales_rewards for callback in algorithm.corrections.callbacks)
    if algorithm.advantages.shift_invariant and looks_within_groups(case) and not scaled:
        size = (
            rollout.rewards[rollout.rewarded].abs().max() if rollout.rewarded.any() else 0.0
        )  # relative to the scale of rewards
        shift = (1.0 + (rollout.groups % 7).to(rollout.rewards.dtype)) * (size or 1.0)
        yield from advantage_changes(case, rollout.replace(rewards=rollout.rewards + shift))


@check(
    culprit=ESTIMATOR,
    expected="an advantage that rises with the reward of its row",
    observed="one that falls, so it unlearns good responses",
    cure="subtract the baseline from the reward, not the reward from the baseline",
)
def advantage_direction(case: AlgorithmCase) -> Iterator[Finding]:
    """The advantage of the worst row of some group rises if its reward rises; advantages depend on the rewards."""
    rollout = case.groups
    known = rollout.rewarded & rollout.valid_tokens.any(-1)
    if not known.any():
        return
    members = [known & (rollout.groups == group) for group in rollout.groups[known].unique()]
    worst = torch.stack([torch.where(rows, rollout.rewards, math.inf).argmin() for rows in members])
    raised = rollout.rewards.clone()
    raised[worst] += (rollout.rewards[known].max() - rollout.rewards[known].min()) or 1.0
    changed = rollout.replace(rewards=raised)
    after = case.advantages_of(changed)
    gains = (after - case.advantages).double().sum(-1)[worst]
    tolerance = signal_rounding(rollout, changed, case.advantages)[worst, 0] * rollout.valid_tokens.sum(-1)[worst]
    falls = (gains < -tolerance) & (after[worst] != 0).any(-1)  # an estimator may drop a group
    shifted = len(worst) == int(known.sum())  # groups of one, whose common shift a batch mean removes
    replaced, advantages = case.contributions("replace_reward"), case.advantages
    if falls.any() and not (gains > tolerance).any():
        yield Finding(samples=rollout.sample_ids[worst[falls]][:4].tolist())
    elif not (replaced or shifted) and advantages.any() and torch.equal(after, advantages):
        yield Finding(observed="advantages that do not depend on the rewards", cure="compute them from the scores")


@check(expected="the same advantages for rows in another order", cure="join by sample_ids and groups")
def row_order(case: AlgorithmCase) -> Iterator[Finding]:
    """Advantages of rows do not depend on their order."""
    rollout = case.groups
    order = torch.sin(1.0 + 7.0 * torch.arange(len(rollout), device=rollout.groups.device)).argsort()
    yield from advantage_changes(case, rollout.select(order), order=order)


@check(culprit=ESTIMATOR, cure="spread an advantage over `valid_tokens` and nowhere else")
def advantage_support(case: AlgorithmCase) -> Iterator[Finding]:
    """Advantages are 0 outside the valid tokens; without rewards of tokens or turns they are constant over a row."""
    rollout, advantages = case.rollout, case.rollout.require("advantages")
    valid, nowhere = rollout.valid_tokens, torch.zeros_like(advantages)
    yield from differences(
        torch.where(valid, nowhere, advantages),
        nowhere,
        rollout.sample_ids,
        expected="0 at every token that is not valid",
        observed="something else",
    )
    low = torch.where(valid, advantages, torch.inf).amin(-1)
    high = torch.where(valid, advantages, -torch.inf).amax(-1)
    rows = (high - low > rounding(advantages.dtype, high.abs(), 1)) & valid.any(-1)
    estimator = case.algorithm.advantages
    if rows.any() and not (estimator.per_token or estimator.turn_rewards):
        yield Finding(
            expected="one advantage at all valid tokens of a row",
            observed="advantages that differ",
            samples=rollout.sample_ids[rows][:4].tolist(),
        )


@check(
    culprit="stage signal, the shaped reward",
    expected="shaped rewards that add up to the score and the token rewards of their row",
    cure="put the score at the last valid token, and build the shaped reward out of place",
)
def reward_conservation(case: AlgorithmCase) -> Iterator[Finding]:
    """Over the valid tokens of a row the shaped rewards add up to its score and its token rewards."""
    rollout, shaped = case.groups.sanitize(), case.signal(case.groups)[1].double()
    scores, tokens = shaped_parts(rollout, case.algorithm.corrections)
    totals = torch.where(rollout.valid_tokens.any(-1), scores, 0.0)
    atol = rounding(rollout.rewards.dtype, scores.abs() + tokens.abs().sum(-1))
    yield from differences(shaped.sum(-1), totals + tokens.sum(-1), rollout.sample_ids, atol=atol)
