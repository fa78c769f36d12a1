"""Intended differences from other systems: positions and our values there."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from goldens.cases import Case

Prediction = Mapping[str, tuple[Tensor, Tensor]]
"""By output field: the positions that may differ, and our value there. Everywhere else the field has to match."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A difference on purpose. What it predicts is worked out from the definition, without the library.

    Attributes:
        name: what we do.
        reason: what the other systems do, and why we do not.
        algorithms: the names that it is about.
        predicts: from a case to the fields that may differ.
    """

    name: str
    reason: str
    algorithms: tuple[str, ...]
    predicts: Callable[[Case], Prediction]


def _scores(case: Case) -> Tensor:
    return case["rewards"] if "rewards" in case else case["token_rewards"].sum(-1)


def _members(case: Case) -> Tensor:
    """Which rows are in the same group, as a matrix."""
    groups = case.ids()
    return (groups[:, None] == groups).double()


def _advantages(positions: Tensor, ours: Tensor) -> Prediction:
    return dict.fromkeys(("advantages", "returns", "scores"), (positions, ours))


def _singleton(case: Case) -> Prediction:
    if case.algorithm in ("reward_norm", "reward_norm_masked"):
        return _alone_among_the_rewarded(case)
    return _advantages(_members(case).sum(-1) == 1, torch.tensor(0.0))


def _singleton_whitened(case: Case) -> Prediction:
    members, mask = _members(case), case.mask()
    if not (members.sum(-1) == 1).any():
        return {}
    scores = _scores(case).double()
    return _whitened(scores - members @ scores / members.sum(-1), mask)


def _singleton_standardised(case: Case) -> Prediction:
    members = _members(case)
    number = members.sum(-1)
    if not (number == 1).any():
        return {}
    scaled = case.params.get("norm_adv_by_std_in_grpo", True)
    total = torch.zeros(len(number), dtype=torch.float64)
    names = [f"reward_{key}" for key in case.params["gdpo_reward_keys"]]
    for name, weight in zip(names, case.params["gdpo_reward_weights"] or [1.0] * len(names), strict=True):
        gap = case[name].double() - members @ case[name].double() / number
        std = (members @ gap.square() / (number - 1).clamp(min=1)).sqrt()
        total += weight * (gap / (std + case.params["epsilon"]) if scaled else gap)
    return _whitened(total, case.mask("attention_mask")[:, case.params["prompt_length"] :])


def _whitened(rows: Tensor, mask: Tensor) -> Prediction:
    tokens = rows[:, None].expand(mask.shape)[mask]
    return _advantages(mask, torch.where(mask, (rows[:, None] - tokens.mean()) / tokens.std(), 0.0))


def _worthless_group(case: Case) -> Prediction:
    members = _members(case)
    mean = members @ _scores(case).double() / members.sum(-1)
    return _advantages((mean <= 0) | (members.sum(-1) == 1), torch.tensor(0.0))


def _overlong(case: Case) -> Prediction:
    beyond = case["response_lengths"] > case.params["max_response_length"]
    return {"rewards_out": (beyond, case["rewards"] - case.params["penalty_factor"])}


def _around_the_mean(case: Case) -> Prediction:
    """AReaL's ``NormConfig`` where it takes the deviation around another mean."""
    levels = case.params["mean_level"], case.params["std_level"]
    return _normalised(case) if levels in ((None, "batch"), (None, "group"), ("batch", "group")) else {}


def _alone_among_the_rewarded(case: Case) -> Prediction:
    """AReaL's ``NormConfig`` for a row whose group, or batch, has no other rewarded row to take its mean from."""
    params, alone = case.params, torch.zeros(len(case["x"]), dtype=torch.bool)
    if case["x"].dim() > 1 or params["mean_level"] is None or not params["mean_leave1out"]:
        return {}
    for rows in _populations(case, params["mean_level"]):
        alone[rows] = _rewarded(case)[rows] & (_rewarded(case)[rows].sum() == 1)
    (counted, ours) = _normalised(case)["y"]
    return {"y": (counted if params["std_level"] == "batch" else alone, ours)} if alone.any() else {}


def _normalised(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Rewards, or tokens, minus a mean, over the deviation of what is left around its own mean."""
    params, counted = case.params, _rewarded(case)
    values = torch.where(counted, case["x"].double(), 0.0)
    for rows in _populations(case, params["mean_level"]):
        kept = counted[rows]
        number = kept.sum()
        factor = number / (number - 1).clamp(min=1) if params["mean_leave1out"] else 1.0
        values[rows] = torch.where(kept, (values[rows] - values[rows].sum() / number.clamp(min=1)) * factor, 0.0)
    for rows in _populations(case, params["std_level"]):
        kept = values[rows][counted[rows]]
        one_row = values.dim() > 1 and params["std_level"] == "group" and len(rows) == 1 and params["std_unbiased"]
        deviation = 1.0 if one_row else kept.std(correction=int(params["std_unbiased"])) if len(kept) > 1 else math.inf
        deviation = deviation if one_row or deviation > 0 else math.inf  # equal values give 0
        values[rows] /= deviation + params["eps"]
    return {"y": (counted, values)}


def _rewarded(case: Case) -> Tensor:
    masks = [case.mask(name) for name in ("loss_mask", "mask") if name in case]
    return masks[0] if masks else torch.ones_like(case["x"], dtype=torch.bool)


def _populations(case: Case, level: str | None) -> tuple[Tensor, ...]:
    rows, size = torch.arange(len(case["x"])), case.params["group_size"]
    sizes = case.params.get("group_sizes") or [size] * (len(rows) // size)
    return {"batch": (rows,), "group": rows.split(sizes) if level == "group" else (), None: ()}[level]


def _no_baseline(case: Case) -> Prediction:
    out = ~case.mask("valid")
    return {"baseline": (out, case["rewards"]), "std": (out, torch.tensor(0.0))}


def _valid_mean(case: Case) -> Prediction:
    mask, values = case.mask(), case["adv"].double()
    whitened = (values - values[mask].mean()) / values[mask].std(correction=0)
    weights = torch.cat([reduction_weights(half, case.params) for half in mask.tensor_split([len(mask) // 2])])
    return {"scaled_advantages": (mask, torch.where(mask, whitened * weights, 0.0))}


def reduction_weights(mask: Tensor, p: Mapping[str, Any]) -> Tensor:
    """Return the weight of each token in a reduction of SkyRL."""
    rows, weights = len(mask), torch.zeros(mask.shape, dtype=torch.float64)
    if p["loss_reduction"] == "token_mean":
        return mask / mask.sum().clamp(min=1)
    if p["loss_reduction"] == "sequence_mean":
        return mask / (rows * mask.sum(-1, keepdim=True).clamp(min=1))
    if p["loss_reduction"] == "seq_mean_token_sum_norm":
        return mask / (rows * p["max_seq_len"])
    size = p["micro_batch_size"]
    parts = [(k * size, (k + 1) * size) for k in range(rows // size)]
    parts = parts if p["loss_reduction"] == "token_mean_legacy" else p["prompt_boundaries"]
    for start, end in parts:
        weights[start:end] = mask[start:end] / mask[start:end].sum().clamp(min=1) / len(parts)
    return weights


def _row_without_tokens(case: Case) -> Prediction:
    empty = ~case.mask().any(-1)
    if not empty.any():
        return {}
    added = -(case["advantages"].double() * empty).sum() / len(empty)
    theirs = torch.as_tensor(case.outputs["loss"].value).double()
    return {"loss": (torch.ones((), dtype=torch.bool), theirs - added)}


RULES: tuple[Rule, ...] = (
    Rule(
        name="a group of one row gets an advantage of 0",
        reason=(
            "verl and SkyRL return the raw reward, which has no baseline; so does AReaL's leave-one-out mean if no "
            "other row is rewarded"
        ),
        algorithms=(
            "grpo",
            "dr_grpo",
            "rloo",
            "opo",
            "gpg",
            "optimal_token_baseline",
            "tir_optimal_token_baseline",
            "reward_norm",
            "reward_norm_masked",
        ),
        predicts=_singleton,
    ),
    Rule(
        name="before whitening, a group of one row gets 0",
        reason="verl whitens the group's raw reward together with the centered rewards of other groups",
        algorithms=("reinforce_plus_plus_baseline",),
        predicts=_singleton_whitened,
    ),
    Rule(
        name="before whitening, each reward of a group of one row gets 0",
        reason="verl whitens the group's raw rewards together with the standardized rewards of other groups",
        algorithms=("gdpo",),
        predicts=_singleton_standardised,
    ),
    Rule(
        name="MaxRL gives 0 to a group of one row and to a group whose mean is not positive",
        reason=(
            "SkyRL divides by any mean: a negative mean flips the sign, a mean near 0 gives huge values, and a "
            "single row keeps its raw reward"
        ),
        algorithms=("maxrl",),
        predicts=_worthless_group,
    ),
    Rule(
        name="the overlong penalty is at least -1 times its factor",
        reason="in verl, AReaL and NeMo-RL the penalty has no lower bound; SkyRL sets the whole reward to 0",
        algorithms=("dapo_overlong",),
        predicts=_overlong,
    ),
    Rule(
        name="a standard deviation is taken around the mean of the same values",
        reason=(
            "AReaL takes deviations from 0, or in a group from the mean of the batch, so a constant added to all "
            "rewards changes the result"
        ),
        algorithms=("reward_norm", "reward_norm_masked", "advantage_norm"),
        predicts=_around_the_mean,
    ),
    Rule(
        name="a row that is not rewarded has no baseline",
        reason=(
            "NeMo-RL computes a baseline, with a denominator that is too small by one row; no advantage uses the "
            "baseline"
        ),
        algorithms=("group_baseline_std",),
        predicts=_no_baseline,
    ),
    Rule(
        name="advantages are centered over the valid tokens",
        reason="SkyRL includes padding in the mean, which then depends on the width of the batch",
        algorithms=("advantage_batch_norm_then_scale",),
        predicts=_valid_mean,
    ),
    Rule(
        name="a row without valid tokens has no loss",
        reason=(
            "TRL's GMPO gives the row a loss of its advantage times a ratio of 1, which is a constant without gradient"
        ),
        algorithms=("gmpo",),
        predicts=_row_without_tokens,
    ),
)
