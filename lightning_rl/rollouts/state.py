"""RunState: everything that a run knows besides its weights, and what of it a checkpoint keeps."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_rl.compatibility import Needs
from lightning_rl.corrections import Contributions, Stat
from lightning_rl.data import Prompt
from lightning_rl.metrics import MetricLog, PhaseTimes, RunningStats
from lightning_rl.policy import Scorer
from lightning_rl.rollouts.held import Held
from lightning_rl.rollouts.prefetch import Ahead

MOST_NONFINITE_IN_A_ROW = 3


@dataclass(slots=True)
class RunState:
    """The one mutable place of a run. Lives outside of the module tree, so it is neither sharded nor moved.

    Attributes:
        contributions: the corrections, found at setup.
        needs: which optional passes have to run.
        reference: the frozen policy, if something reads it.
        replica: what the embedded engine decodes with, where a rank lacks parts of the policy or trains it meanwhile.
        eos_ids: ids that end a response.
        engine_started: whether the engine can take weights.
        held: the rollout in progress.
        ahead: the rollouts in flight.
        metrics: what has not been logged yet.
        validation: the same of the validation that runs.
        times: seconds by phase.
        stepped: whether the policy has moved since it was built.
        skipped: optimizer steps that were left out.
        nonfinite_in_a_row: how many of the last steps had a non-finite gradient.
        loaded: this rank's part of a checkpoint, until fit starts.
    """

    contributions: Contributions = field(default_factory=Contributions)
    needs: Needs = field(default_factory=Needs)
    reference: Scorer | None = None
    replica: PreTrainedModel | None = None
    eos_ids: frozenset[int] = frozenset()
    engine_started: bool = False
    held: Held | None = None
    ahead: Ahead = field(default_factory=Ahead)
    metrics: MetricLog = field(default_factory=MetricLog)
    validation: RunningStats = field(default_factory=RunningStats)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    stepped: bool = False
    skipped: int = 0
    nonfinite_in_a_row: int = 0
    loaded: Mapping[str, Any] | None = None

    def accepts(self, norm: Tensor, *, patient: bool = False) -> bool:
        """Whether a step with this gradient norm is made; counts those that are not.

        Args:
            norm: before clipping.
            patient: never raise, because a gradient scaler is looking for its scale.

        Raises:
            FloatingPointError: if the norm was not finite too often in a row.
        """
        if torch.isfinite(norm):
            self.nonfinite_in_a_row = 0
            self.stepped = True
            return True
        self.skipped += 1
        self.nonfinite_in_a_row += 1
        if not patient and self.nonfinite_in_a_row >= MOST_NONFINITE_IN_A_ROW:
            raise FloatingPointError(
                f"{MOST_NONFINITE_IN_A_ROW} optimizer steps in a row had a gradient norm of {float(norm)}: lower the "
                "learning rate, or look for a loss term, weight or reward that is not finite"
            )
        return False

    def count(self, cycle: int) -> None:
        """Notes how far the run is: number of the rollout, optimizer steps left out."""
        counters = Stat.singles({"optim/skipped": torch.tensor(self.skipped), "rollout": torch.tensor(cycle)})
        self.metrics.add("counter", {name: stat.maximum() for name, stat in counters.items()})

    def state(self) -> dict[str, Any]:
        """This rank's part of a checkpoint, in values that load under ``weights_only=True``."""
        return {
            "held": None if self.held is None else self.held.state(),
            "ahead": self.ahead.state(),
            "metrics": self.metrics.state(),
            "skipped": self.skipped,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def begin(
        self, device: torch.device, *, packed: bool, at: Callable[[Iterable[int]], list[Prompt]], max_staleness: int
    ) -> None:
        """Starts a fit: continues from what was loaded, or drops a rollout that an earlier fit left behind.

        Args:
            device: where the rollout in progress belongs.
            packed: whether microbatches are free of padding.
            at: the prompts at some places of the stream.
            max_staleness: how many rollouts may be in flight.

        Raises:
            ValueError: if the checkpoint has more of them.
        """
        loaded, self.loaded, self.held = self.loaded, None, None
        self.ahead.close()
        self.metrics, self.skipped, self.nonfinite_in_a_row = MetricLog(device), 0, 0
        if self.reference is not None:
            self.reference.to(device)
        if loaded is None:
            return
        self.metrics.load(loaded["metrics"])
        self.skipped, self.nonfinite_in_a_row = loaded["skipped"], loaded["nonfinite_in_a_row"]
        if len(loaded["ahead"]) > max_staleness:
            raise ValueError(
                f"expected a checkpoint with at most {max_staleness} rollouts in flight (max_staleness), got "
                f"{len(loaded['ahead'])}: resume with max_staleness={len(loaded['ahead'])}"
            )
        self.ahead.load(loaded["ahead"], at)
        if loaded["held"] is not None:
            self.held = Held.from_state(loaded["held"], device, packed=packed)

    def load(self, checkpoint: Mapping[str, Any], *, rank: int, world_size: int) -> None:
        """Takes this rank's part of a checkpoint.

        Raises:
            ValueError: if the checkpoint was written by another number of ranks or with another reference.
        """
        self.stepped = True
        ranks, known = checkpoint["ranks"], checkpoint["reference_hash"]
        mine = None if self.reference is None else self.reference.fingerprint
        if len(ranks) != world_size:
            raise ValueError(
                f"expected a checkpoint of {world_size} ranks, got one of {len(ranks)}: resume with as many devices"
            )
        if mine is not None and known is not None and known != mine:
            raise ValueError(
                f"expected the reference of the checkpoint ({known}), got another one ({mine}): pass the reference= "
                "and policy= that the run began with"
            )
        self.loaded = ranks[rank]
