r"""Role-conditioned baseline: subtract the mean reward of a row's role, for self-play.

.. math::
    s_b \leftarrow s_b - B_{r(b)}, \qquad B_r \leftarrow \alpha B_r + (1 - \alpha)\, \bar s_r

where :math:`r(b)` is the role that the policy has in row b, such as the player who moves first, and :math:`\bar s_r`
the mean task reward of that role's rows in a rollout. In a game where one role has better chances, a baseline over all
rows would push up every action of that role. The baseline of a rollout is that of the rollouts before, so it does not
depend on the samples that it is subtracted from; it begins at 0.

Helps in self-play, with ``advantages="reinforce"``. An estimator that compares the samples of a prompt, which have one
role, cancels it.

Source: Liu et al. 2025 (SPIRAL, role-conditioned advantage estimation), arXiv:2506.24119.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.rollout import Rollout
from lightning_rl.samples import RewardCall
from lightning_rl.utils.arguments import check_numbers, check_text
from lightning_rl.utils.naming import in_words


class RoleBaseline(RLCallback):
    """Baseline of each role.

    Logs the baselines of the rows of a rollout as ``role_baseline/<role>``, and their mean as ``role_baseline/mean``.

    Args:
        column: Column of the data with the role of a row. Rows of several games have roles such as ``"poker/0"``.
        decay: Weight of the earlier rollouts, in [0, 1].

    Attributes:
        baselines: Baseline of each role by name.

    Raises:
        ValueError: If an option is out of range; in a rollout, if the data has no such column.
    """

    name = "role_baseline"

    def __init__(self, column: str = "role", *, decay: float = 0.95) -> None:
        check_text(column=column)
        check_numbers(at_least=0, at_most=1, decay=decay)
        self.column, self.decay = column, decay
        self.baselines: Mapping[str, float] = {}
        self._roles: dict[int, str] = {}  # by sample, until the rollout ends

    @override
    def observe_rewards(self, rollout: Rollout, calls: Sequence[RewardCall]) -> None:
        for call in calls[:1]:
            if self.column not in call.columns:
                names = in_words(call.columns) or "none"
                raise ValueError(f'expected a column "{self.column}" of the data for RoleBaseline, got {names}: add it')
            self._roles |= zip(rollout.sample_ids.tolist(), map(str, call.columns[self.column]), strict=True)

    @override
    def reward_bonus(self, rollout: Rollout) -> Float[Tensor, " B"]:
        return -self._of_rows(rollout)

    def _of_rows(self, rollout: Rollout) -> Float[Tensor, " B"]:
        """Return the baseline of each row; 0 for a row without a role, such as padding."""
        values = [self.baselines.get(self._roles.get(sample, ""), 0.0) for sample in rollout.sample_ids.tolist()]
        return torch.tensor(values, dtype=torch.float64, device=rollout.rewards.device)

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        roles, values = [self._roles.get(sample, "") for sample in rollout.sample_ids.tolist()], self._of_rows(rollout)
        masks = {role: torch.tensor([one == role for one in roles]) for role in sorted(self.baselines)}
        stats = {role: Stat.of(values, mask.to(values.device)) for role, mask in masks.items()}
        stats |= {"mean": Stat.of(values, rollout.real)}
        return {f"role_baseline/{role}": stat for role, stat in stats.items()}

    @override
    def observe(self, rollout: Rollout) -> None:
        totals: dict[str, list[float]] = {}
        samples, rewards = rollout.sample_ids.tolist(), rollout.rewards.tolist()
        for sample, reward, rewarded in zip(samples, rewards, rollout.rewarded.tolist(), strict=True):
            if rewarded and sample in self._roles:
                totals.setdefault(self._roles[sample], []).append(reward)
        self._roles = {}
        gathered: dict[str, list[float]] = {}
        for part in self.collectives.objects(totals):
            for role, values in part.items():
                gathered.setdefault(role, []).extend(values)
        means = {role: sum(sorted(values)) / len(values) for role, values in gathered.items()}
        decay = self.decay
        updated = {role: decay * self.baselines.get(role, 0.0) + (1 - decay) * mean for role, mean in means.items()}
        self.baselines = {**self.baselines, **updated}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self.baselines)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.baselines, self._roles = dict(state_dict["baselines"]), {}
