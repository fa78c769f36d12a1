"""Step indices, one for each optimizer step, and the loader that counts them through a run."""

from collections.abc import Iterator, Mapping


class StepIndex:
    """Index of one optimizer step: number of the rollout, step within it, and index in the run."""

    __slots__ = ("index", "rollout", "step")

    def __init__(self, rollout: int, step: int, index: int) -> None:
        self.rollout = rollout
        self.step = step
        self.index = index


class StepLoader:
    """Loader of ``epoch_length`` step indices per epoch; the index continues over epochs and is part of the state.

    Attributes:
        index: Next index.
        committed: Index to resume from; None for ``index``.
    """

    def __init__(self, epoch_length: int, steps_per_rollout: int, start: int = 0) -> None:
        self.epoch_length = epoch_length
        self.steps_per_rollout = steps_per_rollout
        self.index = start
        self.committed: int | None = None

    def __len__(self) -> int:
        """Return the number of step indices of one epoch."""
        return self.epoch_length

    def __iter__(self) -> Iterator[StepIndex]:
        """Yield the next step indices; a generator, so that ``load_state_dict`` may follow ``iter``."""
        for _ in range(self.epoch_length):
            rollout, step = divmod(self.index, self.steps_per_rollout)
            step_index = StepIndex(rollout, step, self.index)
            self.index += 1
            yield step_index

    def state_dict(self) -> dict[str, int]:
        """Return the committed index in the run; Lightning stores the position within the epoch."""
        return {"index": self.index if self.committed is None else self.committed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved index."""
        self.index = state["index"]
