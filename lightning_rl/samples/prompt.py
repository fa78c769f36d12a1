"""Prompt: a prompt with its index in the stream; messages of chats."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.samples.media import Media

Message = Mapping[str, Any]
"""Chat message as in templates: ``role``, ``content``, optional ``tool_calls``, ``name``."""

REWRITTEN = "rewritten"
"""Key that marks the messages of a rewritten context in a conversation's record."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with its index in the stream: index 64, ids (3, 4), content "What is 2 + 3?", columns {"answer": "5"}.

    Args:
        index: Index in the stream; unique in a run.
        token_ids: Token ids that the model continues.
        content: Prompt before tokenization, for rewards: a string, chat messages or token ids.
        columns: All other values of the row, as in the source, for rewards.
        variables: Variables of the chat template in the row, with its tools.
        data_columns: Names of the columns of all rows, once they are known; rewards get None where this row has none.
        media: Pictures of the prompt; None without.
    """

    index: int
    token_ids: tuple[int, ...]
    content: Any
    columns: Mapping[str, Any]
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    data_columns: tuple[str, ...] = field(default=(), repr=False, compare=False)
    media: Media | None = field(default=None, repr=False, compare=False)
