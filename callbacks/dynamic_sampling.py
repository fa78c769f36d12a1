r"""Dynamic sampling: replace groups that teach nothing, because all of their responses have the same reward.

.. math::
    \text{keep group } g \iff \operatorname{std}_{b \in g}(s_b) > \tau

over the responses that have a reward. The core draws as many new groups as were filtered, round after round up to a
bound, and warns if some are still missing; nothing that was drawn is thrown away otherwise, so that sampled is kept
plus filtered. The rewards are those of the task, before bonuses. Each rank refills its own groups at the end of its
share, so with several minibatches the number of ranks decides which prompts share an optimizer step.

Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
"""

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from lightning_rl.arguments import check_counts, check_numbers
from lightning_rl.corrections import RLCallback
from lightning_rl.rollout import Rollout
from lightning_rl.signal.statistics import group_statistics


class DynamicSampling(RLCallback):
    """Filters groups without spread and has them replaced. The core logs ``groups/sampled`` and ``groups/filtered``.

    Args:
        tolerance: standard deviation up to which a group has no spread, above 0.
        max_rounds: how often the prompts of a rollout are drawn at most, the first time included.

    Raises:
        ValueError: if an option is out of range.
    """

    name = "dynamic_sampling"
    compares_groups = True

    def __init__(self, tolerance: float = 1e-6, *, max_rounds: int = 10) -> None:
        check_numbers(above=0, finite=True, tolerance=tolerance)
        check_counts(1, max_rounds=max_rounds)
        self.tolerance = tolerance
        self.max_rounds = max_rounds

    @override
    def keep_groups(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        return group_statistics(rollout.rewards, rollout.groups, rollout.rewarded).std() > self.tolerance
