r"""Curriculum: draw prompts from the pools of the data whose samples have the largest advantages.

A pool holds the rows with one value of a column, such as a level or the data set of a mixture. Its share of the next
prompts is

.. math::
    \operatorname{softmax}_c \frac{Q_c}{\tau}, \qquad
    Q_c \leftarrow Q_c + \alpha \Bigl(\frac{1}{|G_c|} \sum_{g \in G_c} (1 - p_g)\, \overline{|A_g|} - Q_c\Bigr)

where :math:`G_c` are the groups of pool c that a rollout sampled, filtered ones included, :math:`p_g` is the solve rate
of a group and :math:`\overline{|A_g|}` its mean absolute advantage, normalized by its mean and standard deviation:
:math:`2\sqrt{p_g(1-p_g)}` for rewards of 0 and 1. In SEC it is the only factor, equal for solve rates of .2 and .8. The
share of wrong responses, Kimi k1.5's priority of a problem, prefers .2, which leaves more to learn: the product is
largest at 1/4. Every Q begins at 0, with equal shares. The shares are exact over short stretches: the pool that is
furthest behind its share comes next. A pool is shuffled by itself and passes over again when it is used up, without
rows that are mastered.

Helps if the data has levels of difficulty, and many prompts are too easy or too hard.

Source: Chen et al. 2025 (SEC), arXiv:2505.14970; share of wrong responses: Kimi Team 2025, arXiv:2501.12599, section
2.3.4.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl.advantages import Normalized
from lightning_rl.corrections import RLCallback, Stat
from lightning_rl.data import PromptDataset, data_module_of
from lightning_rl.data.mixture import pass_order
from lightning_rl.module import RLLightningModule
from lightning_rl.rewards.correctness import check_correct_by, deciding_scores
from lightning_rl.rollout import Rollout
from lightning_rl.samples import RewardCall
from lightning_rl.signal.statistics import group_statistics
from lightning_rl.utils.arguments import check_numbers, check_text
from lightning_rl.utils.naming import in_words


class RowPool(NamedTuple):
    """State of a pool: Q is 0.8, the pool is 0.4 prompts behind its share, and 12 of its rows were drawn or skipped."""

    value: float = 0.0
    behind: float = 0.0
    drawn: int = 0


class Curriculum(RLCallback):
    """Curriculum over the pools of a column.

    Logs the share of each pool in a rollout as ``curriculum/<value>`` and the fraction of the rows of the data that
    are mastered as ``curriculum/mastered``. Prompts that are taken while earlier results are not known, such as those
    of rollouts ahead, are drawn by the results so far; a place of the stream keeps its row.

    Args:
        column: Column whose values are the pools, such as ``"level"``, or ``"source"`` of a mixture.
        temperature: Temperature of the shares, above 0; a small one draws from the best pool alone.
        rate: Weight of the latest rollout in Q, above 0 and at most 1.
        mastered: Solve rate of a group from which on its row is not drawn again, in (0, 1]; None to draw all rows. If
            all rows are mastered, all are drawn again.
        correct_by: Name of the reward function that decides; None for the first that applies to the response. A
            response is right if its score is at least 1.

    Attributes:
        pools: State of each pool by name.

    Raises:
        ValueError: If an option is out of range; at the start of a fit, if the data is a stream or has no such column.
    """

    name = "curriculum"
    compares_groups = True

    def __init__(
        self,
        column: str,
        *,
        temperature: float = 0.1,
        rate: float = 0.5,
        mastered: float | None = 1.0,
        correct_by: str | None = None,
    ) -> None:
        check_text(column=column)
        check_text(optional=True, correct_by=correct_by)
        check_numbers(above=0, finite=True, temperature=temperature)
        check_numbers(above=0, at_most=1, rate=rate)
        check_numbers(above=0, at_most=1, optional=True, mastered=mastered)
        self.column, self.temperature, self.rate = column, temperature, rate
        self.mastered, self.correct_by = mastered, correct_by
        self.pools: Mapping[str, RowPool] = {}
        self._done = frozenset[int]()  # mastered rows
        self._groups: Mapping[int, tuple[float, bool]] = {}  # signal and mastery by place, until the rollout ends
        self._chosen: Sequence[int] = ()  # row of each place of the stream, kept by the data module
        self._seed: int | None = None
        self._pool_of: Sequence[str] = ()  # of each row
        self._rows: Mapping[str, Sequence[int]] = {}  # of each pool
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}  # latest pass over each pool, and its order

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            rewards = cast(RLLightningModule, pl_module).options.rewards
            check_correct_by(rewards, self.correct_by, type(self).__name__)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = data_module_of(trainer)
        prompts, self._chosen, self._seed = data.prompts, data.chosen, data.seed if data.shuffle else None
        if not isinstance(prompts, PromptDataset):
            raise ValueError(
                "expected data with a length for Curriculum, got a stream: pass a list or a datasets.Dataset"
            )
        if self.column not in prompts.columns:
            raise ValueError(
                f'expected a column "{self.column}" of the data for Curriculum, got {in_words(prompts.columns)}: add it'
            )
        self._pool_of = [str(value) for value in prompts.column(self.column)]
        rows: dict[str, list[int]] = {}
        for row, pool in enumerate(self._pool_of):
            rows.setdefault(pool, []).append(row)
        self._rows, self._orders = rows, {}

    @override
    def choose_rows(self, number: int) -> Sequence[int]:
        done = Counter(self._pool_of[row] for row in self._done)
        live = [pool for pool, rows in self._rows.items() if done[pool] < len(rows)]
        if not live:
            self._done, live = frozenset(), [*self._rows]
        pools = {pool: self.pools.get(pool, RowPool()) for pool in self._rows}
        best = max(pools[pool].value for pool in live)
        shares = {pool: math.exp((pools[pool].value - best) / self.temperature) for pool in live}
        total, chosen = sum(shares.values()), list[int]()
        for _ in range(number):
            for pool in live:
                pools[pool] = pools[pool]._replace(behind=pools[pool].behind + shares[pool] / total)
            pool = max(live, key=lambda one: pools[one].behind)
            row, drawn = self._next(pool, pools[pool].drawn)
            pools[pool] = pools[pool]._replace(behind=pools[pool].behind - 1, drawn=drawn)
            chosen.append(row)
        self.pools = pools
        return chosen

    def _next(self, pool: str, drawn: int) -> tuple[int, int]:
        """Return the next row of a pool that is not mastered, and the number of rows drawn and skipped with it."""
        while True:
            number, offset = divmod(drawn, len(self._rows[pool]))
            row, drawn = self._order(pool, number)[offset], drawn + 1
            if row not in self._done:
                return row, drawn

    def _order(self, pool: str, number: int) -> Sequence[int]:
        """Return the rows of a pool in the order of a pass."""
        rows, (latest, order) = self._rows[pool], self._orders.get(pool, (-1, ()))
        if latest != number:
            order = rows
            if self._seed is not None:
                key = self._seed, number, [*self._rows].index(pool)
                order = [rows[place] for place in pass_order(len(rows), *key).tolist()]
            self._orders[pool] = number, order
        return order

    @override
    def observe_rewards(self, rollout: Rollout, calls: Sequence[RewardCall]) -> None:
        signals, rates, scored = group_signal(rollout, self.correct_by)
        mastered = rates >= (math.inf if self.mastered is None else self.mastered)
        rows = zip(rollout.groups.tolist(), signals.tolist(), mastered.tolist(), scored.tolist(), strict=True)
        self._groups = {
            **self._groups,
            **{group: (signal, done) for group, signal, done, known in rows if known and self._has(group)},
        }

    @override
    def observe(self, rollout: Rollout) -> None:
        gathered: dict[int, tuple[float, bool]] = {}
        for part in self.collectives.objects(dict(self._groups)):
            gathered |= part
        self._groups = {}
        by_pool: dict[str, list[float]] = {}
        for place in sorted(gathered):
            signal, done = gathered[place]
            row = self._chosen[place]
            by_pool.setdefault(self._pool_of[row], []).append(signal)
            self._done |= {row} if done else set()
        updated = {
            pool: before._replace(value=before.value + self.rate * (sum(values) / len(values) - before.value))
            for pool, values in by_pool.items()
            if (before := self.pools.get(pool, RowPool()))
        }
        self.pools = {**self.pools, **updated}

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        pools = [self._pool_of[self._chosen[place]] if self._has(place) else "" for place in rollout.groups.tolist()]
        device, mastered = rollout.groups.device, len(self._done) / max(len(self._pool_of), 1)
        values = {name: torch.tensor([pool == name for pool in pools], device=device) for name in self._rows}
        values["mastered"] = torch.full_like(rollout.rewards, mastered)
        return {f"curriculum/{name}": stat for name, stat in Stat.many(values, rollout.real).items()}

    def _has(self, place: int) -> bool:
        """Return True if the row of a place was chosen; False for padding, and without this callback."""
        return 0 <= place < len(self._chosen)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"pools": {name: tuple(pool) for name, pool in self.pools.items()}, "done": sorted(self._done)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pools = {name: RowPool(*pool) for name, pool in state_dict["pools"].items()}
        self._done, self._groups = frozenset(state_dict["done"]), {}


def group_signal(
    rollout: Rollout, correct_by: str | None = None
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"], Bool[Tensor, " B"]]:
    """Return signal and solve rate of each row's group, and the rows that have a score.

    The signal is the mean absolute advantage times the share of wrong responses.
    """
    scores = deciding_scores(rollout, correct_by).double()
    scored = rollout.rewarded & ~scores.isnan()
    advantages = Normalized(unbiased=False).per_row(scores, rollout.groups, scored).abs()
    means, rates = (
        group_statistics(each, rollout.groups, scored).mean for each in (advantages, (scores >= 1).double())
    )
    return means * (1 - rates), rates, scored
