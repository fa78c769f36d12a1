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
    for key in case.params["gdpo_reward_keys"]:
        rewards = case[f"reward_{key}"].double()
        gap = rewards - members @ rewards / number
        total += gap / ((members @ gap.square() / (number - 1).clamp(min=1)).sqrt() + case.params["epsilon"])
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
    if (case.params["mean_level"], case.params["std_level"]) != (None, "batch"):
        return {}
    values = case["x"].double()
    return {"y": (torch.ones_like(values, dtype=torch.bool), values / (values.std() + case.params["eps"]))}


def _no_baseline(case: Case) -> Prediction:
    out = ~case.mask("valid")
    return {"baseline": (out, case["rewards"]), "std": (out, torch.tensor(0.0))}


def _valid_mean(case: Case) -> Prediction:
    mask, values = case.mask(), case["adv"].double()
    half = len(mask) // 2
    sizes = torch.tensor([half, len(mask) - half])
    tokens = torch.tensor([mask[:half].sum(), mask[half:].sum()]).repeat_interleave(sizes)
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
        reason="verl and SkyRL return the raw reward, which has no baseline",
        algorithms=(
            "grpo",
            "dr_grpo",
            "rloo",
            "opo",
            "gpg",
            "optimal_token_baseline",
            "tir_optimal_token_baseline",
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
        reason="AReaL takes deviations from 0, so a constant added to all rewards changes the result",
        algorithms=("reward_norm",),
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
