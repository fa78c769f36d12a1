"""Where the library differs from another system on purpose: at which positions, and what our value is there."""

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
    total = torch.zeros(len(number), dtype=torch.float64)
    names = [f"reward_{key}" for key in case.params["gdpo_reward_keys"]]
    for name, weight in zip(names, case.params["gdpo_reward_weights"] or [1.0] * len(names), strict=True):
        gap = case[name].double() - members @ case[name].double() / number
        std = (members @ gap.square() / (number - 1).clamp(min=1)).sqrt()
        total += weight * gap / (std + case.params["epsilon"])
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
    if (mean, std) not in ((None, "batch"), (None, "group"), ("batch", "group")) or case.params["mean_leave1out"]:
        return {}
    rewarded = case.mask("loss_mask") if "loss_mask" in case else torch.ones_like(values, dtype=torch.bool)
    sizes = case.params.get("group_sizes") or [case.params["group_size"]] * (len(values) // case.params["group_size"])
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    members = ((groups[:, None] == groups) | (std == "batch")) & rewarded
    number = members.sum(-1)
    gaps = (values - (members.double() @ values / number.clamp(min=1))[:, None]) * members
    deviation = (gaps.square().sum(-1) / (number - int(case.params["std_unbiased"])).clamp(min=1)).sqrt()
    centred = values if mean is None else values - values[rewarded].mean()
    ours = torch.where(rewarded & (deviation > 0), centred / (deviation + case.params["eps"]), 0.0)
    return {"y": (rewarded, ours)}


def _no_baseline(case: Case) -> Prediction:
    out = ~case.mask("valid")
    return {"baseline": (out, case["rewards"]), "std": (out, torch.tensor(0.0))}


def _valid_mean(case: Case) -> Prediction:
    mask, values = case.mask(), case["adv"].double()
    half = len(mask) // 2
    tokens = torch.tensor([mask[:half].sum(), mask[half:].sum()]).repeat_interleave(
        torch.tensor([half, len(mask) - half])
    )
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
        name="a group of one teaches nothing: 0",
        reason="verl and SkyRL let its raw reward through, which has no baseline and another scale than the rest",
        algorithms=("grpo", "dr_grpo", "rloo", "opo"),
        predicts=_singleton,
    ),
    Rule(
        name="a group of one teaches nothing: 0 before whitening",
        reason="verl whitens its raw reward together with the centred ones",
        algorithms=("reinforce_plus_plus_baseline",),
        predicts=_singleton_whitened,
    ),
    Rule(
        name="a group of one teaches nothing: 0 for each reward before whitening",
        reason="verl whitens its raw rewards together with the standardised ones",
        algorithms=("gdpo",),
        predicts=_singleton_standardised,
    ),
    Rule(
        name="MaxRL needs a positive mean and two rows: else 0",
        reason="SkyRL divides by any mean: the sign flips below 0, the size explodes near it, a single row stays raw",
        algorithms=("maxrl",),
        predicts=_worthless_group,
    ),
    Rule(
        name="the overlong penalty ends at -1 times its factor",
        reason="verl, AReaL and NeMo-RL let it grow without bound; SkyRL sets the whole reward to 0, which can be more",
        algorithms=("dapo_overlong",),
        predicts=_overlong,
    ),
    Rule(
        name="a deviation is taken around its own mean",
        reason="AReaL takes it around 0, or in a group around the batch's mean: an offset of the rewards changes it",
        algorithms=("reward_norm", "reward_norm_masked"),
        predicts=_around_the_mean,
    ),
    Rule(
        name="a row that is not rewarded has no baseline",
        reason="NeMo-RL divides the sum over its group by one row too few; no advantage is made of it",
        algorithms=("group_baseline_std",),
        predicts=_no_baseline,
    ),
    Rule(
        name="advantages are centred over the valid tokens",
        reason="SkyRL subtracts the mean over padding as well, so that it depends on the width of the batch",
        algorithms=("advantage_batch_norm_then_scale",),
        predicts=_valid_mean,
    ),
    Rule(
        name="a row without valid tokens has no loss",
        reason="TRL's GMPO counts its advantage with a ratio of 1: a constant without gradient",
        algorithms=("gmpo",),
        predicts=_row_without_tokens,
    ),
)
