"""Choice of the reward function that decides if a response is correct, for evaluations and corrections."""

import torch
from jaxtyping import Float
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_rl.rewards.scoring import Rewards
from lightning_rl.rollout import Rollout
from lightning_rl.signal.masked import group_index
from lightning_rl.utils.naming import in_words


def deciding_scores(rollout: Rollout, correct_by: str | None) -> Float[Tensor, " B"]:
    """Return the score by which each response is correct or not; NaN where there is none.

    Args:
        rollout: Rollout with rewards.
        correct_by: Name of the reward function that decides; None for the first that applies to the row, functions of
            positive weight first.
    """
    if not rollout.rewards_by_function:
        return rollout.rewards
    if correct_by is not None:
        return rollout.rewards_by_function[correct_by]
    first, *others = rollout.rewards_by_function.values()
    for scores in others:
        first = torch.where(first.isnan(), scores, first)
    return first


def solve_counts(rollout: Rollout) -> tuple[int, int]:
    """Return the numbers of groups whose scores are all at least 1, and at most 0, by the function that decides."""
    (index, number), scores = group_index(rollout.groups), deciding_scores(rollout, None)

    def all_of(right: Tensor) -> int:
        parts = (right, ~right & ~scores.isnan())
        found, others = (torch.zeros(number).index_add_(0, index, part.float()) for part in parts)
        return int(((found > 0) & (others == 0)).sum())

    return all_of(scores >= 1), all_of(scores <= 0)


def check_correct_by(rewards: Rewards, correct_by: str | None, who: str, *, signed: bool = True) -> None:
    """Check the name of the function that decides; print a line if none of several is named.

    Args:
        rewards: Reward functions.
        correct_by: Name of the function that decides, or None.
        who: Name of the evaluation or correction.
        signed: True if high scores have to be correct.

    Raises:
        ValueError: If there is no such function, or none is named and each weight is negative.
    """
    names = [name for name, weight in rewards.weights.items() if weight] or list(rewards.weights)
    if correct_by is not None and correct_by not in rewards.weights:
        raise ValueError(
            f"expected correct_by of {who} among the reward functions {in_words(rewards.weights)}, got {correct_by!r}"
        )
    first = rewards.by_importance[0]
    if correct_by is None and signed and rewards.weights[first] < 0:
        raise ValueError(
            f"expected a reward function of positive weight that decides if a response is correct for {who}, got "
            f'"{first}" of weight {rewards.weights[first]:g}: name one with correct_by='
        )
    if correct_by is None and len(names) > 1:
        rank_zero_info(
            f'{who}: a response is correct by "{first}", or where it does not apply, by the next of the reward '
            f"functions {in_words(names)}: name another with correct_by="
        )
