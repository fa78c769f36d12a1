"""Normalised rewards and advantages, and the statistics that they are made of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from goldens.cases import Case, Outputs
from goldens.reduction_options import average_of
from goldens.registry import NotOfferedError, choose, only, replays, without_effect
from lightning_rl import RLOO, Normalized
from lightning_rl.signal.masked import global_moments, row_mean, whiten
from lightning_rl.signal.statistics import group_statistics


@replays("normalization/*")
def whitened(case: Case) -> Outputs:
    """Values shifted and scaled over all valid tokens."""
    unbiased = case.params.get("unbiased", True)
    shifted = case.params.get("shift_mean", True)
    without_effect(case, "high_precision")
    only(case, epsilon=(1e-8,))  # inside a root, where it only keeps equal values finite
    epsilon = case.params.get("eps", 0.0)
    return {"y": whiten(case["x"], case.mask(), shifted=shifted, unbiased=unbiased, epsilon=epsilon)}


@replays("normalization/masked_normalize")
def whitened_rows(case: Case) -> Outputs:
    """The same for each row by itself, with the population's variance."""
    values, mask = case["x"], case.mask()
    only(case, eps=(1e-8,))  # as above
    if "dim" in case.params and case.params["dim"] is None:
        return {"y": whiten(values, mask, unbiased=False)}
    columns = choose(case, "dim", {0: True, 1: False, -1: False}, default=1)
    values, mask = (values.T, mask.T) if columns else (values, mask)
    rows = [whiten(row[None], valid[None], unbiased=False) for row, valid in zip(values, mask, strict=True)]
    return {"y": torch.cat(rows).T if columns else torch.cat(rows)}


def tokens_normalised(values: Tensor, mask: Tensor, params: Mapping[str, Any]) -> Tensor:
    """Tokens centred, then scaled by the deviation of what is left, each over the batch, a group, or not at all."""
    options = norm_options(params)
    sizes = {"batch": [len(values)], "group": group_sizes(params, len(values))}

    def centred(rows: Tensor, valid: Tensor) -> Tensor:
        moments = global_moments(rows, valid)
        factor = moments.number / (moments.number - 1).clamp(min=1) if options["leave_one_out"] else 1.0
        alone = options["leave_one_out"] and options["mean"] == "group" and len(rows) == 1
        return moments.deviation * factor * (not alone)

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


@replays("normalization/Normalization")
def areal_norm(case: Case) -> Outputs:
    """AReaL's ``NormConfig`` on tokens, or on one number for each row."""
    values = case["x"]
    if values.dim() > 1:
        return {"y": tokens_normalised(values, case.mask(), case.params)}
    rewarded = case.mask("loss_mask") if "loss_mask" in case else torch.ones(len(values), dtype=torch.bool)
    sizes = torch.tensor(group_sizes(case.params, len(values)))
    groups = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return {"y": rewards_normalised(values, groups, rewarded, case.params)}


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


def group_sizes(params: Mapping[str, Any], rows: int) -> list[int]:
    """Return the numbers of rows of AReaL's groups; a NotOfferedError if the rows do not fill them."""
    sizes, size = params.get("group_sizes"), params.get("group_size") or 1
    levels = params.get("mean_level"), params.get("std_level")
    if sizes is None and "group" in levels and rows % size:
        raise NotOfferedError(
            f"group_size={size!r}"
        )  # AReaL leaves the last rows without a mean and divides by epsilon
    return [size] * (rows // size) if sizes is None else list(sizes)


@replays("normalization/calculate_baseline_and_std_per_prompt")
def baseline_and_std(case: Case) -> Outputs:
    """The mean and the deviation of each row's group, or of the other rows of its group."""
    rewards, groups, valid = case["rewards"], case.ids(), case.mask("valid")
    if case.params.get("leave_one_out_baseline", True):
        baseline = torch.where(valid, rewards - RLOO().per_row(rewards, groups, valid), rewards)
        return {"baseline": baseline, "std": std_of_others(rewards, groups, valid)}
    group = group_statistics(rewards, groups, valid)
    alone = group.number <= 1
    mean, std = (one.to(rewards.dtype) for one in (group.mean, group.std()))
    return {"baseline": torch.where(alone, rewards, mean), "std": torch.where(alone, 0.0, std)}


def std_of_others(rewards: Tensor, groups: Tensor, rewarded: Tensor) -> Tensor:
    """The deviation of each row's group without the row itself; 0 for fewer than two others."""
    found = rewards.clone()
    for row in range(len(rewards)):
        others = rewarded.clone()
        others[row] = False
        found[row] = group_statistics(rewards, groups, others).std()[row]
    return torch.where(rewarded, found, 0.0)


@replays("normalization/masked_mean")
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


@replays("normalization/_normalize_advantages")
def whitened_and_weighed(case: Case) -> Outputs:
    """Advantages whitened over the valid tokens of the batch, then weighed by the mini-batch."""
    mask, params = case.mask(), case.params
    only(case, mini_batch_boundaries=("[(0,B//2),(B//2,B)]",))
    values = whiten(case["adv"], mask, unbiased=False) if params.get("advantage_batch_normalize", True) else case["adv"]
    halves = slice(len(mask) // 2), slice(len(mask) // 2, None)
    return {"scaled_advantages": values * torch.cat([_weights(case, half) for half in halves])}


def _weights(case: Case, rows: slice) -> Tensor:
    part = replace(case, arrays={"mask": case.arrays["mask"][rows]})
    mask = part.mask()
    return average_of(part).weights(mask, mask.new_ones(len(mask)))
