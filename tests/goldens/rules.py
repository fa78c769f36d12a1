"""Intended differences from other systems: positions and our values there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    mean, std, values = case.params["mean_level"], case.params["std_level"], case["x"].double()
    if (mean, std) not in ((None, "batch"), (None, "group"), ("batch", "group")):
        return {}
    counted = next((case.mask(name) for name in ("loss_mask", "mask") if name in case), values == values)
    number = counted.sum()
    leave_one_out = number / (number - 1) if case.params["mean_leave1out"] else 1.0
    centred = values if mean is None else (values - values[counted].mean()) * leave_one_out
    ours = torch.zeros_like(values)
    for rows in _populations(case, std):
        here = torch.zeros_like(counted)
        here[rows] = counted[rows]
        if here.any() and centred[here].max() > centred[here].min():
            deviation = centred[here].std(correction=int(case.params["std_unbiased"]))
            ours[here] = centred[here] / (deviation + case.params["eps"])
    return {"y": (counted, ours)}


def _populations(case: Case, level: str) -> tuple[Tensor, ...]:
    rows, size = torch.arange(len(case["x"])), case.params["group_size"]
    sizes = case.params.get("group_sizes") or [size] * (len(rows) // size)
    return (rows,) if level == "batch" else rows.split(sizes)


def _alone_among_the_rewarded(case: Case) -> Prediction:
    """A row whose group, or batch, has no other rewarded row to take its mean from."""
    params = case.params
    rewarded = case.mask("loss_mask") if "loss_mask" in case else torch.ones(len(case["x"]), dtype=torch.bool)
    if params["mean_level"] is None or not params["mean_leave1out"]:
        return {}
    alone = torch.zeros_like(rewarded)
    for rows in _populations(case, params["mean_level"]):
        alone[rows] = rewarded[rows] & (rewarded[rows].sum() == 1)
    return {"y": (alone, torch.tensor(0.0))}


def _no_baseline(case: Case) -> Prediction:
    out = ~case.mask("valid")
    return {"baseline": (out, case["rewards"]), "std": (out, torch.tensor(0.0))}


def _valid_mean(case: Case) -> Prediction:
    mask, values = case.mask(), case["adv"].double()
    half = len(mask) // 2
    sizes = torch.tensor([half, len(mask) - half])
    tokens = torch.tensor([mask[:half].sum(), mask[half:].sum()]).repeat_interleave(sizes)
    if case.params["loss_reduction"] == "sequence_mean":
        tokens = mask.sum(-1) * sizes.repeat_interleave(sizes)
    whitened = (values - values[mask].mean()) / values[mask].std(correction=0)
    return {"scaled_advantages": (mask, torch.where(mask, whitened / tokens[:, None].clamp(min=1), 0.0))}


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
        reason="verl, SkyRL and AReaL's leave-one-out return the raw reward, which has no baseline",
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
            "AReaL takes deviations from 0, or those of a group from the batch's mean, so a constant added to all "
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
