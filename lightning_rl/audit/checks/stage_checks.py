"""Checks of the stages between engine and update: contributions depend on the rows, not on their place."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_rl.audit.evidence import Evidence
from lightning_rl.corrections import Stat
from lightning_rl.corrections.stat import merge_moments, reduce_moments
from lightning_rl.distributed.threaded_ranks import ThreadedRanks
from lightning_rl.rollout import PROMPT, Rollout
from lightning_rl.testing.properties.case import SHOWN_A_ROLLOUT, CorrectionMethod
from lightning_rl.testing.properties.check import check
from lightning_rl.testing.properties.comparisons import Skip
from lightning_rl.testing.properties.row_changes import METRICS, Change, close, moved_rows, repeats_itself
from lightning_rl.utils.finding import Finding

FILTER = "keep_groups"
WIDER = 3  # positions of padding
JITTER = 1e-3  # difference of rewards that avoids ties
FILTERED_GROUPS = 6  # groups per call of a filter
PATIENCE = 5.0  # seconds for ranks to join a collective
PROVIDING_GROUPS = 2  # groups per call of provide, which may run a model


def changes(rollout: Rollout) -> list[Change]:
    """Return copies with other orders of groups and rows, and with additional padding."""
    device = rollout.groups.device
    everything = torch.arange(len(rollout), device=device)
    interleaved = (10.0 * torch.sin(1.0 + 7.0 * everything)).argsort()
    wider = rollout.fit_width(rollout.width + WIDER)
    wider = wider.map(lambda tensor, axis, pad: _widen(tensor, pad) if axis == PROMPT else tensor)
    return [
        Change("the same for rows in another order", rollout.select(interleaved), interleaved),
        Change("the same for rows in reverse order", rollout.select(everything.flip(0)), everything.flip(0)),
        Change("the same with more padding behind prompts and responses", wider, everything),
    ]


def parts(rollout: Rollout, *, number: int | None = None) -> list[Change]:
    """Return the groups in ``number`` parts, by default one group per part."""
    groups = rollout.groups.unique()
    number = len(groups) if number is None else min(number, len(groups))
    masks = [torch.isin(rollout.groups, groups[part::number]) for part in range(number)]
    expected = "the same for a prompt's samples without those of others"
    return [Change(expected, rollout.select(mask), mask.nonzero()[:, 0]) for mask in masks]


def _widen(tensor: Tensor, pad: float) -> Tensor:
    return torch.cat([tensor, tensor.new_full((len(tensor), WIDER, *tensor.shape[2:]), pad)], 1)


def _apart(rollout: Rollout) -> Rollout:
    """Return a copy in which all rewards differ, by a pattern over samples."""
    jitter = JITTER * torch.sin(1.0 + 3.0 * rollout.sample_ids).to(rollout.rewards.dtype)
    return rollout.replace(rewards=rollout.rewards + jitter * rollout.rewards.abs().max().clamp(min=1.0))


def _with_equal_groups(rollout: Rollout) -> Rollout:
    """Return a copy in which some groups have equal rewards, and all other rewards differ."""
    within = torch.sin(1.0 + 3.0 * rollout.sample_ids) * (torch.sin(2.0 + 5.0 * rollout.groups) > 0)
    return rollout.replace(rewards=(torch.cos(rollout.groups.double()) + within).to(rollout.rewards.dtype))


def _rows_of(evidence: Evidence, contribution: CorrectionMethod) -> Rollout:
    """Return a few groups as the contribution gets them; filters get the dropped groups too."""
    if contribution.method != FILTER or not evidence.rounds:
        return evidence.groups.sanitize()
    rollout = evidence.rounds[0]
    few = torch.isin(rollout.groups, rollout.groups[rollout.real].unique()[:FILTERED_GROUPS])
    rollout = rollout.select(few)
    rewarded = rollout.rewarded & evidence.algorithm.corrections.reward_mask(rollout)
    return rollout.replace(rewarded=rewarded).sanitize()


def _changes_of(contribution: CorrectionMethod, rollout: Rollout) -> list[Change]:
    """Return the changed copies for a contribution; filters get additional padding."""
    further = list[Change]()
    if contribution.method == FILTER:
        wide = rollout.fit_width(2 * rollout.width + WIDER)
        everything = torch.arange(len(rollout), device=rollout.groups.device)
        further = [Change("the same with more padding behind prompts and responses", wide, everything)]
    return [*changes(rollout), *further]


def _contribute_on_ranks(contribution: CorrectionMethod, rows: Sequence[Rollout]) -> list[Any]:
    """Return the contribution on each rank's rows.

    Raises:
        RuntimeError: If ranks differ in their collectives, which would hang a run.
    """
    ranks, jobs = ThreadedRanks(len(rows), timeout=PATIENCE), list[Callable[[], Any]]()
    for part in rows:
        callback = copy.copy(contribution.callback)
        callback.collectives = ranks
        jobs.append(partial(contribution._replace(callback=callback), part))
    try:
        return ranks.run(jobs, threads=torch.get_num_threads())
    except threading.BrokenBarrierError:
        raise RuntimeError(f"expected the same collectives of {contribution} on every rank, got other ones") from None


def _tied_rows(rollout: Rollout) -> Tensor:
    """Return the rows with the length of another row of their group, whose ties may depend on the order, [B]."""
    same = (rollout.groups[:, None] == rollout.groups) & (rollout.response_lengths[:, None] == rollout.response_lengths)
    return same.sum(-1) > 1


def strays(contribution: CorrectionMethod, rollout: Rollout, change: Change) -> Tensor:
    """Return the rows of a changed copy with another contribution that is not due to ties, [b] bool."""
    moved = moved_rows(contribution, rollout, change)
    if contribution.method == FILTER:  # filters often depend on ties: groups with equal rewards
        other = change._replace(rollout=_with_equal_groups(change.rollout))
        return moved | moved_rows(contribution, _with_equal_groups(rollout), other)
    if not moved.any() or contribution.method == METRICS:
        return moved
    apart = change._replace(rollout=_apart(change.rollout))
    moved = moved_rows(contribution, _apart(rollout), apart)
    return moved & ~_tied_rows(rollout)[change.rows] if len(change.rows) == len(rollout) else moved


@check(
    observed="something else", cure="join by sample_ids and groups, count valid tokens, and ignore the place of rows"
)
def contribution_rows(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Contributions before the update do not depend on the order of rows or on padding.

    A filter decides about whole groups.
    """
    for contribution in evidence.contributions(*SHOWN_A_ROLLOUT):
        rollout = _rows_of(evidence, contribution)
        if not repeats_itself(contribution, rollout):
            yield Skip(f"{contribution} is not repeatable")
            continue
        if contribution.method == FILTER and len(split := _split_groups(contribution(rollout), rollout)):
            expected = "one decision for all samples of a prompt"
            yield Finding(culprit=str(contribution), expected=expected, samples=split)
            continue
        for change in _changes_of(contribution, rollout):
            moved = strays(contribution, rollout, change)
            if moved.any():
                samples = change.rollout.sample_ids[moved][:4].tolist()
                yield Finding(culprit=str(contribution), expected=change.expected, samples=samples)
                break


def _split_groups(kept: Tensor, rollout: Rollout) -> list[int]:
    partly = torch.isin(rollout.groups, rollout.groups[kept]) & ~kept
    return rollout.sample_ids[partly][:4].tolist()


@check(
    expected="the same for a prompt's samples, independent of other prompts in the rollout",
    observed="something else without them",
    cure="use one group at a time, or declare that prompts are compared: batch_statistics = True",
)
def contribution_groups(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Contributions to a row before the update depend only on the rows of its prompt.

    So they do not depend on the split over ranks, unless the correction declares ``batch_statistics``.
    """
    if len(evidence.groups.groups.unique()) < 2:
        yield Skip("only one prompt was checked")
    for contribution in evidence.contributions(*SHOWN_A_ROLLOUT):
        rollout = _rows_of(evidence, contribution)
        metrics = contribution.method == METRICS  # computed over all rows
        if metrics or contribution.compares_prompts or not repeats_itself(contribution, rollout):
            continue
        for change in parts(rollout):
            moved = strays(contribution, rollout, change)
            if moved.any():
                yield Finding(culprit=str(contribution), samples=change.rollout.sample_ids[moved][:4].tolist())
                break


@check(
    expected="the same for every split of the rows over ranks",
    observed="something else on two ranks",
    cure="sum over ranks with self.collectives, and return Stat.of(values, mask) instead of a mean of means",
)
def contribution_ranks(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Metrics, and contributions and fields that compare prompts, do not depend on the split of rows over ranks.

    ``Stat.single``, one number per rank, is checked only in runs on several ranks.
    """
    rollout = evidence.groups.sanitize()
    split = parts(rollout, number=2)
    if len(split) < 2:
        yield Skip("only one prompt was checked")
        return
    sharded = evidence.outputs is not None and not evidence.facts.plain_forward
    for contribution in evidence.contributions(*SHOWN_A_ROLLOUT, *(() if sharded else ("provide",))):
        metrics = contribution.method == METRICS
        if not (metrics or contribution.compares_prompts) or not repeats_itself(contribution, rollout):
            continue
        said = _contribute_on_ranks(contribution, [change.rollout for change in split])
        if metrics:
            names = _rank_dependent_names(contribution(rollout), said, several=evidence.facts.ranks > 1)
            yield from (Finding(culprit=f"{contribution}, {name}") for name in names[:1])
            continue
        for change, share in zip(split, said, strict=True):
            moved = moved_rows(contribution, rollout, change, share)
            if moved.any():
                yield Finding(culprit=str(contribution), samples=change.rollout.sample_ids[moved][:4].tolist())
                break


def _rank_dependent_names(
    whole: Mapping[str, Stat], shares: Sequence[Mapping[str, Stat]], *, several: bool
) -> list[str]:
    """Return the names of the statistics that differ after merging those of the ranks."""
    names = list[str]()
    for name, stat in whole.items():
        merged = merge_moments(torch.stack([share[name].moments for share in shares]))
        figures = [torch.tensor(reduce_moments(part.tolist(), stat.reduction)) for part in (stat.moments, merged)]
        if (several or float(stat.moments[0]) != 1) and not close(*figures).all():
            names.append(name)
    return names


@check(
    expected="the fields that this correction provides for these rows",
    observed="others for the same rows in another order and without other rows",
    cure="provide by row: join by sample_ids, count valid tokens, draw no random numbers",
)
def provided_fields(evidence: Evidence) -> Iterator[Finding | Skip]:
    """Fields that a correction provides depend on their rows, not on order, padding or other rows."""
    providers = evidence.contributions("provide")
    if providers and evidence.outputs is not None and not evidence.facts.plain_forward:
        yield Skip("models are sharded, so one rank cannot score a few rows")
        return
    for contribution in providers:
        few = torch.isin(evidence.groups.groups, evidence.groups.groups.unique()[:PROVIDING_GROUPS])
        rollout = evidence.groups.select(few)
        change = changes(rollout)[1]
        wider = change.rollout.fit_width(rollout.width + WIDER)
        for name, theirs in ({} if contribution.compares_prompts else contribution(wider)).items():
            field, _, key = name.partition("/")
            recorded = getattr(rollout, field, {}).get(key)
            wrong = _unlike(recorded, theirs, change.rows, wider, evidence.facts.tolerance)
            if wrong.any():
                samples = wider.sample_ids[wrong][:4].tolist()
                yield Finding(culprit=f"{contribution}, {name}", samples=samples)
                break


def _unlike(ours: Tensor | None, theirs: Tensor, order: Tensor, wider: Rollout, tolerance: float) -> Tensor:
    """Return the rows of which a provided tensor differs from the recorded one, [b] bool."""
    if ours is None:
        return torch.zeros_like(order, dtype=torch.bool)
    mine, other = ours[order].double(), theirs.double()
    if ours.dim() > 1 and theirs.shape[1] == wider.width:
        inside = wider.valid_tokens[:, : ours.shape[1]]
        inside = inside.reshape(*inside.shape, *[1] * (ours.dim() - 2))
        mine, other = (torch.where(inside, part[:, : ours.shape[1]], 0.0) for part in (mine, other))
    mine, other = (part.reshape(len(order), -1) for part in (mine, other))
    gap = torch.where(mine.isnan() & other.isnan(), 0.0, (mine - other).abs().nan_to_num(nan=torch.inf))
    return gap.mean(-1) > tolerance * (1.0 + mine.nan_to_num().abs().amax(-1))
