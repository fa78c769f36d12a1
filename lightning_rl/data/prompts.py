"""A prompt with its place in the stream, and the batches that validation evaluates."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with its place in the stream.

    Args:
        index: number in the stream; unique in a run.
        token_ids: what the model continues.
        content: the prompt as the model sees it before it becomes tokens: a string, chat messages or token ids; for
            rewards.
        columns: whatever else its row of the data holds, each value as the source gives it, for rewards.
    """

    index: int
    token_ids: tuple[int, ...]
    content: Any
    columns: Mapping[str, Any]


class PromptBatch:
    """Validation prompts that are evaluated together, as a plain object, which Lightning passes on as it is."""

    __slots__ = ("prompts",)

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = tuple(prompts)


class PromptBatches:
    """The validation loader. A plain list would count as several loaders."""

    def __init__(self, prompts: Sequence[Prompt], size: int) -> None:
        self.batches = [PromptBatch(prompts[start : start + size]) for start in range(0, len(prompts), size)]

    def __len__(self) -> int:
        """How many batches."""
        return len(self.batches)

    def __iter__(self) -> Iterator[PromptBatch]:
        """Every batch."""
        return iter(self.batches)
