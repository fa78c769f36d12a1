"""Tickets: each admits to one optimizer step; the loader counts them through a run."""

from collections.abc import Iterator, Mapping


class Ticket:
    """Admits to one optimizer step: number of the rollout, step within it, and number of the ticket in the run."""

    __slots__ = ("index", "rollout", "step")

    def __init__(self, rollout: int, step: int, index: int) -> None:
        self.rollout = rollout
        self.step = step
        self.index = index


class TicketLoader:
    """Yields ``epoch_length`` tickets for each pass; resumes where its state says. The position outlives epochs."""

    def __init__(self, epoch_length: int, steps_per_rollout: int, start: int = 0) -> None:
        self.epoch_length = epoch_length
        self.steps_per_rollout = steps_per_rollout
        self.index = start

    def __len__(self) -> int:
        """Tickets of one epoch."""
        return self.epoch_length

    def __iter__(self) -> Iterator[Ticket]:
        """The next tickets. The body runs at the first ``next``, so after a possible ``load_state_dict``."""
        for _ in range(self.epoch_length):
            rollout, step = divmod(self.index, self.steps_per_rollout)
            ticket = Ticket(rollout, step, self.index)
            self.index += 1
            yield ticket

    def state_dict(self) -> dict[str, int]:
        """Position in the run; Lightning itself knows how much of the epoch is left."""
        return {"index": self.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues at a saved position."""
        self.index = state["index"]
