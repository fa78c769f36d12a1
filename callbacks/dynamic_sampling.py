r"""Dynamic sampling: replace groups whose responses all have the same reward and thus no advantage.

.. math::
    \text{keep group } g \iff \operatorname{std}_{b \in g}(s_b) > \tau

over the responses that have a reward, with the task reward before bonuses. As many new groups are sampled as were
filtered, for up to ``max_rounds`` rounds; a warning reports groups that are still missing. Each rank replaces its own
groups and appends the new ones, so with several minibatches the number of ranks affects which prompts share a step.

Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
"""

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import RLCallback
from lightning_rl.rollout import Rollout
from lightning_rl.signal.statistics import group_statistics
from lightning_rl.utils.arguments import check_counts, check_numbers


class DynamicSampling(RLCallback):
    """Filter for groups without reward variance. Logs ``groups/sampled`` and ``groups/filtered``.

    Args:
        tolerance: Largest standard deviation at which a group is filtered, above 0.
        max_rounds: Maximum number of sampling rounds per rollout, the first included.

    Raises:
        ValueError: If an option is out of range.
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
