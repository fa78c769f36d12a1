"""ReplayCorrections: corrections around a finished rollout and a table of log-probabilities instead of the policy."""

from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from lightning_rl.corrections.combine import Corrections
from lightning_rl.rollout import Rollout, RolloutT


class ReplayCorrections(Corrections):
    """Corrections of a rollout that carries what they provided, where no model runs."""

    @override
    def provide(self, rollout: RolloutT) -> RolloutT:
        """Leaves the rollout as it is."""
        return rollout

    @override
    @contextmanager
    def forward_context(self, rows: Rollout) -> Iterator[None]:
        """Enters nothing."""
        yield
