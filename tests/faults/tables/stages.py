"""Contributions that depend on the padded width, the order of the rows, their neighbors or the rank.

Each is right for the batch that its author tested.
"""

from collections.abc import Mapping

import torch
from kit.support import tiny_prompts
from torch import Tensor
from typing_extensions import override

from faults.fault import Fault, user
from lightning_rl import LossView, RLCallback, Rollout, Stat

LONGEST = 24
RAGGED = {"max_new_tokens": LONGEST, "eos_token_ids": [1, 5, 9]}
"""Responses of very different lengths, so that the padded width of a rollout is seldom the longest one allowed."""


class WidthMask(RLCallback):
    """Masks rows of the full width as truncated."""

    name = "width_mask"

    @override
    def reward_mask(self, rollout: Rollout) -> Tensor:
        return rollout.response_lengths < rollout.width


class NotTooLong(RLCallback):
    """Gives no reward to rows longer than the mean of this rank."""

    name = "not_too_long"

    @override
    def reward_mask(self, rollout: Rollout) -> Tensor:
        return rollout.response_lengths <= rollout.response_lengths.double().mean() * 1.2


class ShortGroups(RLCallback):
    """Filters groups whose responses fill the batch's width."""

    name = "short_groups"

    @override
    def keep_groups(self, rollout: Rollout) -> Tensor:
        limit = rollout.width * 0.4
        lengths = rollout.response_lengths.double()
        means = [lengths[rollout.groups == group].mean() for group in rollout.groups]
        return torch.stack(means) <= limit if means else lengths > 0


class FoursWithSpread(RLCallback):
    """Dynamic sampling that reshapes by another group size."""

    name = "fours_with_spread"

    @override
    def keep_groups(self, rollout: Rollout) -> Tensor:
        keep, whole = torch.ones(len(rollout), dtype=torch.bool), len(rollout) // 4 * 4
        spread = rollout.rewards[:whole].reshape(-1, 4).std(-1) > 0
        keep[:whole] = spread.repeat_interleave(4)
        return keep


class LongestTenth(RLCallback):
    """Excludes the longest tenth of the rows of this rank."""

    name = "longest_tenth"

    @override
    def exclude(self, rollout: Rollout) -> Tensor:
        if not len(rollout):
            return torch.zeros(0, dtype=torch.bool)
        return rollout.response_lengths > torch.quantile(rollout.response_lengths.double(), 0.9)


class ListedDifficulty(RLCallback):
    """Joins a list of difficulties in file order with rows in batch order."""

    name = "listed_difficulty"

    @override
    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        return {"extras/difficulty": torch.linspace(0.5, 1.5, max(len(rollout), 1))[: len(rollout)]}

    @override
    def token_weight(self, view: LossView) -> Tensor:
        weight = view.extras["difficulty"].to(view.logprobs.dtype)
        return weight[:, None].expand_as(view.logprobs).detach()


class StandardizedOnRank(RLCallback):
    """Provides rewards standardized over the rows of this rank, and weighs with them."""

    name = "standardized_on_rank"

    @override
    def provide(self, rollout: Rollout) -> Mapping[str, Tensor]:
        centred = rollout.rewards - rollout.rewards.mean()
        return {"extras/standardized": centred / centred.square().mean().sqrt().clamp(min=1e-3)}

    @override
    def token_weight(self, view: LossView) -> Tensor:
        weight = view.extras["standardized"].sigmoid().to(view.logprobs.dtype)
        return weight[:, None].expand_as(view.logprobs).detach()


class ListedBonus(RLCallback):
    """A bonus joined by position: the n-th of a list to the n-th row."""

    name = "listed_bonus"

    @override
    def reward_bonus(self, rollout: Rollout) -> Tensor:
        return torch.tensor([0.0, 0.5, 0.1])[torch.arange(len(rollout)) % 3]


class ShorterThanRank(RLCallback):
    """A bonus for rows shorter than the mean of this rank, without declaring the comparison."""

    name = "shorter_than_rank"

    @override
    def reward_bonus(self, rollout: Rollout) -> Tensor:
        lengths = rollout.response_lengths.float()
        return 0.1 * (lengths.mean() - lengths)


class Patience(RLCallback):
    """Spreads a token reward evenly over the padded width."""

    name = "patience"

    @override
    def token_reward(self, rollout: Rollout) -> Tensor:
        share = torch.arange(rollout.width) / rollout.width
        return -0.2 * share.expand(len(rollout), -1).contiguous()


class Fill(RLCallback):
    """Measures the filled share of the batch's width."""

    name = "fill"

    @override
    def rollout_metrics(self, rollout: Rollout) -> Mapping[str, Stat]:
        return {"fill/share": Stat.of(rollout.response_lengths / rollout.width, rollout.real)}


class UpperHalf(RLCallback):
    """Measures the entropy of every second row of a microbatch."""

    name = "upper_half"

    @override
    def metrics(self, view: LossView) -> Mapping[str, Stat]:
        even = torch.arange(len(view)) % 2 == 0
        return {"upper_half/entropy": Stat.of(view.entropy, view.valid_tokens & even[:, None])}


class MeanOfMeans(RLCallback):
    """Measures the mean of each microbatch."""

    name = "mean_of_means"

    @override
    def metrics(self, view: LossView) -> Mapping[str, Stat]:
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
    user("a reward mask that takes the widest row for truncated", WidthMask, options=RAGGED),
    user("a reward mask by the mean length of a rank", NotTooLong, options=RAGGED),
    user("a filter by the padded width", ShortGroups, options=RAGGED),
    user(
        "a filter that reshapes by another group size", FoursWithSpread, options=PAIRS, data=lambda: tiny_prompts(48, 8)
    ),
    user("the longest tenth of a rank left out", LongestTenth, options=RAGGED),
    user("a difficulty from a list by position", ListedDifficulty),
    user("a provided reward standardised on a rank", StandardizedOnRank),
    user("a bonus from a list by position", ListedBonus),
    user(
        "a bonus that compares with the rows of a rank and does not say so",
        ShorterThanRank,
        options={"advantages": "reinforce_plus_plus"},
    ),
    user("a token reward over the padded width", Patience, options={**RAGGED, "advantages": "reinforce_plus_plus"}),
    user("a user's figure as a share of the padded width", Fill, options=RAGGED),
    user("a user's figure over every second row of a microbatch", UpperHalf),
    user("a user's figure that is a mean of means", MeanOfMeans, options={"max_tokens_per_microbatch": 24}),
    user("the length of right answers by the rewards of the row above", RightAnswers),
)
