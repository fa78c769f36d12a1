r"""Dynamic sampling: replace groups whose responses all have the same reward and thus no advantage.

.. math::
    \text{keep group } g \iff \operatorname{std}_{b \in g}(s_b) > \tau

over the responses that have a reward, with the score :math:`s_b` of the reward function that decides if a response is
correct. As many new groups are sampled as were
filtered, for up to ``max_rounds`` rounds; a warning reports groups that are still missing. Each rank replaces its own
groups and appends the new ones, so with several minibatches the number of ranks affects which prompts share a step.

Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2.
"""

from typing import cast

from jaxtyping import Bool
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import RLCallback
from lightning_rl.module import RLLightningModule
from lightning_rl.rewards.correctness import check_correct_by, deciding_scores
from lightning_rl.rollout import Rollout
from lightning_rl.signal.statistics import group_statistics
from lightning_rl.utils.arguments import check_counts, check_numbers, check_text


class DynamicSampling(RLCallback):
    """Filter for groups without variance of the deciding score. Logs ``groups/sampled`` and ``groups/filtered``.

    Args:
        tolerance: Largest standard deviation at which a group is filtered, above 0.
        max_rounds: Maximum number of sampling rounds per rollout, the first included.
        correct_by: Name of the reward function that decides; None for the first that applies to the response. Several
            without a name print a line.

    Raises:
        ValueError: If an option is out of range; at setup, if there is no such reward function.
    """

    name = "dynamic_sampling"
    compares_groups = True

    def __init__(self, tolerance: float = 1e-6, *, max_rounds: int = 10, correct_by: str | None = None) -> None:
        check_numbers(above=0, finite=True, tolerance=tolerance)
        check_counts(1, max_rounds=max_rounds)
        check_text(optional=True, correct_by=correct_by)
        self.tolerance = tolerance
        self.max_rounds = max_rounds
        self.correct_by = correct_by

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            rewards = cast(RLLightningModule, pl_module).options.rewards
            check_correct_by(rewards, self.correct_by, type(self).__name__, signed=False)

    @override
    def keep_groups(self, rollout: Rollout) -> Bool[Tensor, " B"]:
        scores = deciding_scores(rollout, self.correct_by)
        return group_statistics(scores, rollout.groups, rollout.rewarded & ~scores.isnan()).std() > self.tolerance
