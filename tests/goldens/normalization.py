"""Normalised rewards and advantages, and the statistics that they are made of."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.registry import replays
from lightning_rl import RLOO, Normalized
from lightning_rl.signal.masked import global_moments, row_mean, whiten
from lightning_rl.signal.reductions import sequence_mean, token_mean
from lightning_rl.signal.statistics import group_statistics


@replays("masked_whiten", "masked_normalization")
def whitened(case: Case) -> Outputs:
    """Values shifted and scaled over all valid tokens."""
    unbiased = case.params.get("unbiased", True)
    shifted = case.params.get("shift_mean", True)
    epsilon = case.params.get("eps", 0.0) if case.algorithm == "masked_normalization" else 0.0
    return {"y": whiten(case["x"], case.mask(), shifted=shifted, unbiased=unbiased, epsilon=epsilon)}


@replays("row_normalize")
def whitened_rows(case: Case) -> Outputs:
    """The same for each row by itself, with the population's variance."""
    mask = case.mask()
    rows = [whiten(row[None], valid[None], unbiased=False) for row, valid in zip(case["x"], mask, strict=True)]
    return {"y": torch.cat(rows)}


@replays("advantage_norm")
def whitened_by_level(case: Case) -> Outputs:
    """AReaL's ``NormConfig`` on tokens."""
    return {"y": tokens_normalised(case["x"], case.mask(), case.params)}


def tokens_normalised(values: Tensor, mask: Tensor, params: Mapping[str, Any]) -> Tensor:
    """Tokens centred, then scaled by the deviation of what is left, each over the batch, a group, or not at all."""
    options = norm_options(params)
    sizes = {"batch": len(values), "group": params.get("group_size") or len(values)}

    def centred(rows: Tensor, valid: Tensor) -> Tensor:
        moments = global_moments(rows, valid)
        factor = moments.number / (moments.number - 1).clamp(min=1) if options["leave_one_out"] else 1.0
        return moments.deviation * factor * (not options["leave_one_out"] or len(rows) > 1)

    def scaled(rows: Tensor, valid: Tensor) -> Tensor:
        moments = global_moments(rows, valid)
        std = moments.std(unbiased=options["unbiased"])
        alone = options["std"] == "group" and len(rows) == 1 and options["unbiased"]  # AReaL takes a row's as 1
        std = torch.ones_like(std) if alone else torch.where(moments.spread, std, torch.inf)
        return rows / (std + options["epsilon"])

    found = torch.where(mask, values, 0.0).double()
    for level, function in ((options["mean"], centred), (options["std"], scaled)):
        if level in sizes:
            groups = zip(found.split(sizes[level]), mask.split(sizes[level]), strict=True)
            found = torch.cat([function(rows, valid) for rows, valid in groups])
    return torch.where(mask, found, 0.0).to(values.dtype)


@replays("reward_norm", "reward_norm_masked")
def reward_norm(case: Case) -> Outputs:
    """One number for each row, over its group or the batch."""
    values = case["x"]
    rewarded = case.mask("loss_mask") if "loss_mask" in case else torch.ones(len(values), dtype=torch.bool)
    return {"y": rewards_normalised(values, _groups(case, len(values)), rewarded, case.params)}


def rewards_normalised(values: Tensor, groups: Tensor, rewarded: Tensor, params: Mapping[str, Any]) -> Tensor:
    """AReaL's ``NormConfig``. The deviation is that of what is left once the rows are centred."""
    options = norm_options(params)
    if options["mean"] != options["std"] or options["leave_one_out"]:
        values = Normalized(**options | {"std": "none"}).per_row(values, groups, rewarded)
        options |= {"mean": "none", "leave_one_out": False}
    return Normalized(**options).per_row(values, groups, rewarded)


def norm_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """AReaL's ``NormConfig`` as our options."""
    mean, std = params.get("mean_level") or "none", params.get("std_level") or "none"
    return {
        "mean": mean,
        "std": std,
        "leave_one_out": bool(params.get("mean_leave1out")) and mean != "none",
        "unbiased": params.get("std_unbiased", True),
        "epsilon": params.get("eps", 1e-5),
    }


def _groups(case: Case, rows: int) -> Tensor:
    sizes = case.params.get("group_sizes")
    if sizes is None:
        return torch.arange(rows) // case.params["group_size"]
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


@replays("group_baseline_std")
def baseline_and_std(case: Case) -> Outputs:
    """The mean and the deviation of the other rows of each row's group."""
    rewards, groups, valid = case["rewards"], case.ids(), case.mask("valid")
    baseline = torch.where(valid, rewards - RLOO().per_row(rewards, groups, valid), rewards)
    return {"baseline": baseline, "std": std_of_others(rewards, groups, valid)}


def std_of_others(rewards: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """The deviation of each row's group without the row itself; 0 for fewer than two others."""
    found = rewards.clone()
    for row in range(len(rewards)):
        others = rewarded.clone()
        others[row] = False
        found[row] = group_statistics(rewards, groups, others).std()[row]
    return torch.where(rewarded, found, 0.0)


@replays("masked_stats")
def statistics(case: Case) -> Outputs:
    """Mean, sum and variance over the valid entries."""
    values, mask = case["x"], case.mask()
    moments = global_moments(values, mask)
    total = (moments.number * moments.mean).to(values.dtype)
    factor = case.params.get("global_normalization_factor")
    return {
        "mean": moments.mean.to(values.dtype),
        "row_mean": row_mean(values, mask),
        "sum": total,
        "var_unbiased": moments.std().square().to(values.dtype),
        "var_biased": moments.std(unbiased=False).square().to(values.dtype),
        **({} if factor is None else {"global_mean": total / factor}),
    }


@replays("advantage_batch_norm_then_scale")
def whitened_and_weighed(case: Case) -> Outputs:
    """Advantages whitened over the valid tokens of the batch, then weighed by the mini-batch."""
    mask, params = case.mask(), case.params
    values = whiten(case["adv"], mask, unbiased=False) if params.get("advantage_batch_normalize", True) else case["adv"]
    reduction = sequence_mean if params.get("loss_reduction") == "sequence_mean" else token_mean
    halves = mask[: len(mask) // 2], mask[len(mask) // 2 :]
    weights = [reduction(half, half.new_ones(len(half)), torch.arange(len(half))) for half in halves]
    return {"scaled_advantages": values * torch.cat(weights)}
