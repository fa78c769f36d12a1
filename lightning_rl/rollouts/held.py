"""Held: the rollout in progress, kept from its first optimizer step to its last and through checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_rl.policy import Plan
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A finished rollout with its plan, and the write counters that it had when it was finished.

    Args:
        cycle: number of the rollout.
        rollout: with its signal.
        plan: used by every pass over it.
        written: :meth:`Rollout.versions` when the rollout was finished.
    """

    cycle: int
    rollout: Rollout
    plan: Plan
    written: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(cycle: int, rollout: Rollout, plan: Plan) -> "Held":
        """Holds a rollout from now on."""
        return Held(cycle=cycle, rollout=rollout, plan=plan, written=rollout.versions())

    def check_untouched(self) -> None:
        """Raises a RuntimeError that names the field if anybody wrote to the rollout since it was finished."""
        changed = [name for name, version in self.rollout.versions().items() if version != self.written[name]]
        if changed:
            raise RuntimeError(
                f"the held rollout was written to in place between optimizer steps: {', '.join(changed)}; some "
                "callback keeps a reference to it and edits it"
            )

    def state(self) -> dict[str, Any]:
        """Plain values and tensors that load under ``weights_only=True``."""
        return {"cycle": self.cycle, "rollout": self.rollout.to("cpu").state(), "rows": self.plan.rows()}

    @staticmethod
    def from_state(state: Mapping[str, Any], device: torch.device, *, packed: bool) -> "Held":
        """The inverse of :meth:`state`, on a device."""
        rollout = Rollout.from_state(state["rollout"])
        plan = plan_of_rows(rollout, state["rows"], packed=packed)
        return Held.of(state["cycle"], rollout.to(device), plan.to(device))
