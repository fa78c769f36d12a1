"""Position in the data, step indices, one for each optimizer step, and the loader that counts them through a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run in its data: 32 prompts are taken, and optimizer step 8 is the next one.

    Attributes:
        cursor: Number of prompts taken from the stream.
        index: Index of the next optimizer step in the run.
    """

    cursor: int = 0
    index: int = 0


class Positioned(Protocol):
    """Owner of the position: the live one, and the committed one, which checkpoints store."""

    position: Position
    committed: Position


class StepIndex:
    """Index of one optimizer step: rollout 2, step 1 within it, and index 9 in a run with 4 steps per rollout."""

    __slots__ = ("index", "rollout", "step")

    def __init__(self, rollout: int, step: int, index: int) -> None:
        self.rollout = rollout
        self.step = step
        self.index = index


class StepLoader:
    """Loader of ``epoch_length`` step indices per epoch, which advances the live position of ``data``."""

    def __init__(self, epoch_length: int, steps_per_rollout: int, data: Positioned) -> None:
        self.epoch_length = epoch_length
        self.steps_per_rollout = steps_per_rollout
        self.data = data

    def __len__(self) -> int:
        """Return the number of step indices of one epoch."""
        return self.epoch_length

    def __iter__(self) -> Iterator[StepIndex]:
        """Yield the next step indices; a generator, so that ``load_state_dict`` may follow ``iter``."""
        for _ in range(self.epoch_length):
            index = self.data.position.index
            self.data.position = replace(self.data.position, index=index + 1)
            yield StepIndex(*divmod(index, self.steps_per_rollout), index)

    def state_dict(self) -> dict[str, int]:
        """Return the committed index in the run; Lightning stores the position within the epoch."""
        return {"index": self.data.committed.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved index."""
        self.data.position = replace(self.data.position, index=state["index"])
