"""Data loader of a validation, test or prediction."""

from collections.abc import Iterator, Sequence

from lightning_rl.data import Prompt


class EvaluationBatch:
    """Prompts whose requests go to the engine together, as a plain object, which Lightning does not move to a device.

    Attributes:
        parts: Prompts of each evaluation; empty for an exhausted one.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Sequence[Prompt]]) -> None:
        self.parts = tuple(map(tuple, parts))

    @classmethod
    def check(cls, batch: object) -> None:
        """Raise TypeError for a batch of a loader of the user."""
        if not isinstance(batch, cls):
            raise TypeError(
                f"expected prompts of a data module, got a {type(batch).__name__} of another loader: pass "
                "PromptDataModule(prompts, prompts_per_rollout=1) as datamodule="
            )


class EvaluationLoader:
    """Loader of batches of at most ``size`` prompts of each evaluation, until the longest one ends.

    With one loader for all, Trainer limits cut each evaluation, and the engine gets one call per batch.
    """

    def __init__(self, prompts: Sequence[Sequence[Prompt]], size: int) -> None:
        longest = max(map(len, prompts))
        self.batches = [
            EvaluationBatch([part[start : start + size] for part in prompts]) for start in range(0, longest, size)
        ]

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.batches)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        """Iterate over the batches."""
        return iter(self.batches)
