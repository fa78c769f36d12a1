"""The loader of a validation, test or prediction: each batch holds the next prompts of every evaluation."""

from collections.abc import Iterator, Sequence

from lightning_rl.data import Prompt


class EvaluationBatch:
    """Prompts whose requests go to the engine together, as a plain object, which Lightning passes on as it is.

    Attributes:
        parts: the prompts of each evaluation, by its number; none of an evaluation that has no more.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        self.parts = tuple(map(tuple, parts))


class EvaluationLoader:
    """Batches of at most ``size`` prompts of each evaluation, until the longest one ends.

    One loader for all of them: a limit of batches then cuts each, and the engine is asked once for a batch.
    """

    def __init__(self, prompts: Sequence[Sequence[Prompt]], size: int) -> None:
        longest = max(map(len, prompts))
        self.batches = [
            EvaluationBatch([part[start : start + size] for part in prompts]) for start in range(0, longest, size)
        ]

    def __len__(self) -> int:
        """How many batches."""
        return len(self.batches)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        """Every batch."""
        return iter(self.batches)
