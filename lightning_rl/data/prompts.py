"""A prompt with its place in the stream."""

from collections.abc import Mapping
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
