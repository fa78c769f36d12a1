"""Contributions that depend on the padded width, the order of the rows, their neighbors or the rank.

Each is right for the batch that its author tested.
"""

from collections.abc import Mapping

import torch
from kit.support import tiny_prompts
from torch import Tensor
from typing_extensions import override

from faults.fault import Fault, correction, user
from lightning_rl import LossView, RLCallback, Rollout, Stat

LONGEST = 24
RAGGED = {"max_new_tokens": LONGEST, "eos_token_ids": [1, 5, 9]}
"""Responses of very different lengths, so that the padded width of a rollout is seldom the longest one allowed."""


def width_mask(rollout: Rollout) -> Tensor:
    return rollout.response_lengths < rollout.width


def not_too_long(rollout: Rollout) -> Tensor:
    return rollout.response_lengths <= rollout.response_lengths.double().mean() * 1.2


def short_groups(rollout: Rollout) -> Tensor:
    limit = rollout.width * 0.4
    lengths = rollout.response_lengths.double()
    means = [lengths[rollout.groups == group].mean() for group in rollout.groups]
    return torch.stack(means) <= limit if means else lengths > 0


def fours_with_spread(rollout: Rollout) -> Tensor:
    keep, whole = torch.ones(len(rollout), dtype=torch.bool), len(rollout) // 4 * 4
    spread = rollout.rewards[:whole].reshape(-1, 4).std(-1) > 0
    keep[:whole] = spread.repeat_interleave(4)
    return keep


def longest_tenth(rollout: Rollout) -> Tensor:
    if not len(rollout):
        return torch.zeros(0, dtype=torch.bool)
    return rollout.response_lengths > torch.quantile(rollout.response_lengths.double(), 0.9)


def listed_difficulty(view: LossView) -> Tensor:
    weight = view.extras["difficulty"].to(view.logprobs.dtype)
    return weight[:, None].expand_as(view.logprobs).detach()


def provided_listed_difficulty(rollout: Rollout) -> Mapping[str, Tensor]:
    return {"extras/difficulty": torch.linspace(0.5, 1.5, max(len(rollout), 1))[: len(rollout)]}


def standardized_on_rank(view: LossView) -> Tensor:
    weight = view.extras["standardized"].sigmoid().to(view.logprobs.dtype)
    return weight[:, None].expand_as(view.logprobs).detach()


def provided_standardized_on_rank(rollout: Rollout) -> Mapping[str, Tensor]:
    centred = rollout.rewards - rollout.rewards.mean()
    return {"extras/standardized": centred / centred.square().mean().sqrt().clamp(min=1e-3)}


def listed_bonus(rollout: Rollout) -> Tensor:
    return torch.tensor([0.0, 0.5, 0.1])[torch.arange(len(rollout)) % 3]


def shorter_than_rank(rollout: Rollout) -> Tensor:
    lengths = rollout.response_lengths.float()
    return 0.1 * (lengths.mean() - lengths)


def patience(rollout: Rollout) -> Tensor:
    share = torch.arange(rollout.width) / rollout.width
    return -0.2 * share.expand(len(rollout), -1).contiguous()


def fill(rollout: Rollout) -> Mapping[str, Stat]:
    return {"fill/share": Stat.of(rollout.response_lengths / rollout.width, rollout.real)}


def upper_half(view: LossView) -> Mapping[str, Stat]:
    even = torch.arange(len(view)) % 2 == 0
    return {"upper_half/entropy": Stat.of(view.entropy, view.valid_tokens & even[:, None])}


def mean_of_means(view: LossView) -> Mapping[str, Stat]:
    surprise, valid = -view.logprobs.detach(), view.valid_tokens
    mean = surprise[valid].mean() if valid.any() else torch.tensor(0.0)
    return {"mean_of_means/surprise": Stat.single(mean)}


class RightAnswers(RLCallback):
    """Measures the length of right answers, with the rewards of the previous rows."""

    name = "right_answers"

    def __init__(self, shift: int = 1) -> None:
        self.shift = shift

    @override
    def rollout_metrics(self, rollout: Rollout) -> Mapping[str, Stat]:
        right = rollout.rewards.roll(self.shift) > 0
        return {"right_answers/length": Stat.of(rollout.response_lengths, right & rollout.rewarded)}


PAIRS = {"group_size": 2}


FAULTS: tuple[Fault, ...] = (
    user("a reward mask that takes the widest row for truncated", correction(reward_mask=width_mask), options=RAGGED),
    user("a reward mask by the mean length of a rank", correction(reward_mask=not_too_long), options=RAGGED),
    user("a filter by the padded width", correction(keep_groups=short_groups), options=RAGGED),
    user(
        "a filter that reshapes by another group size",
        correction(keep_groups=fours_with_spread),
        options=PAIRS,
        data=lambda: tiny_prompts(48, 8),
    ),
    user("the longest tenth of a rank left out", correction(exclude=longest_tenth), options=RAGGED),
    user(
        "a difficulty from a list by position",
        correction(token_weight=listed_difficulty, provide=provided_listed_difficulty),
    ),
    user(
        "a provided reward standardised on a rank",
        correction(token_weight=standardized_on_rank, provide=provided_standardized_on_rank),
    ),
    user("a bonus from a list by position", correction(reward_bonus=listed_bonus)),
    user(
        "a bonus that compares with the rows of a rank and does not say so",
        correction(reward_bonus=shorter_than_rank),
        options={"advantages": "reinforce_plus_plus"},
    ),
    user(
        "a token reward over the padded width",
        correction(token_reward=patience),
        options={**RAGGED, "advantages": "reinforce_plus_plus"},
    ),
    user("a user's figure as a share of the padded width", correction(rollout_metrics=fill), options=RAGGED),
    user("a user's figure over every second row of a microbatch", correction(metrics=upper_half)),
    user(
        "a user's figure that is a mean of means",
        correction(metrics=mean_of_means),
        options={"max_tokens_per_microbatch": 24},
    ),
    user("the length of right answers by the rewards of the row above", RightAnswers),
)
