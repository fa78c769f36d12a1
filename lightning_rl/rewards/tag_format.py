"""Reward for tagged parts in order, such as reasoning and answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.rewards.text import texts_of
from lightning_rl.utils.arguments import check_texts


@dataclass(frozen=True, kw_only=True)
class TagFormat:
    """Format reward: 1 if a completion is ``<think> ... </think> <answer> ... </answer>`` and nothing else, else 0.

    Each tag occurs once, in order, with only whitespace before, between and after the parts. An empty part does not
    count.

    Source: the format reward of DeepSeek-AI 2025 (DeepSeek-R1), arXiv:2501.12948, section 2.2.2.

    Args:
        tags: Names of the parts, in order.
        prefix: Text prepended to each completion, such as ``"<think>"`` if the chat template already opens it.
        partial: Score a completion in another form by the share of its opening and closing tags that occur once.

    Raises:
        ValueError: If there are no tags, a tag occurs twice, or a tag is not a name.

    Example:
        >>> TagFormat()(["?"] * 2, ["<think>a</think><answer>b</answer>", "b"])
        [1.0, 0.0]
    """

    tags: tuple[str, ...] = ("think", "answer")
    prefix: str = ""
    partial: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        check_texts(tags=self.tags)
        if not isinstance(self.prefix, str):
            raise ValueError(f"expected prefix to be a string, got {self.prefix!r}")
        if not all(tag.isidentifier() for tag in self.tags) or not self.tags or len(set(self.tags)) < len(self.tags):
            raise ValueError(f"expected tags to be different names, such as ('think', 'answer'), got {self.tags!r}")

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """Return one value per completion."""
        return [self._score(self.prefix + text) for text in texts_of(completions)]

    def _score(self, text: str) -> float:
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        once = [text.count(mark) == 1 for mark in marks]
        if all(once) and self._in_order(text, marks):
            return 1.0
        return sum(once) / len(marks) if self.partial else 0.0

    def _in_order(self, text: str, marks: Sequence[str]) -> bool:
        """Return True if the text is an alternation of the tags, non-empty parts and whitespace."""
        pieces: list[str] = []
        for mark in marks:
            before, present, text = text.partition(mark)
            if not present:
                return False
            pieces.append(before)
        outside, inside = [*pieces[::2], text], pieces[1::2]
        return not any(piece.strip() for piece in outside) and all(piece.strip() for piece in inside)
