"""Again: what it takes to compute a finished rollout's signal again, with a table in the place of the policy."""

from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from lightning_rl.advantages import Advantages, Estimator, RewardSignal
from lightning_rl.hooks import Contributions
from lightning_rl.rollout import Rollout


class Provided(Contributions):
    """Corrections on a rollout that carries what they provided, around a table in the place of the policy."""

    @override
    def provide(self, rollout: Rollout) -> Rollout:
        """Leaves the rollout as it is."""
        return rollout

    @override
    @contextmanager
    def forward_context(self, rows: Rollout) -> Iterator[None]:
        """Enters nothing."""
        yield


class Spy(Estimator):
    """An estimator, and what it was given."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.seen: RewardSignal | None = None

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        """Estimates, and keeps the signal."""
        self.seen = signal
        return self.estimator(signal)
