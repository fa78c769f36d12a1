"""ReplayCorrections: corrections for a recorded rollout, without a model."""

from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from lightning_rl.corrections.combine import Corrections
from lightning_rl.rollout import Rollout, RolloutT


class ReplayCorrections(Corrections):
    """Corrections of a rollout that already contains the provided tensors."""

    @override
    def provide(self, rollout: RolloutT) -> RolloutT:
        """Return the rollout unchanged."""
        return rollout

    @override
    @contextmanager
    def forward_context(self, rows: Rollout) -> Iterator[None]:
        """Enter no context."""
        yield
