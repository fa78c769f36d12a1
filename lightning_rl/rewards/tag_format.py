"""TagFormat: whether a completion is made of tagged parts in order, such as thinking and then an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.arguments import check_bools, check_texts
from lightning_rl.rewards.text import texts_of


@dataclass(frozen=True, kw_only=True)
class TagFormat:
    """1 if a completion is ``<think> ... </think> <answer> ... </answer>`` and nothing else, else 0.

    Each tag stands there once, in order, with only whitespace before, between and after the parts; a part that is empty
    or whitespace does not count.

    Source: the format reward of DeepSeek-AI 2025 (DeepSeek-R1), arXiv:2501.12948, section 2.2.2.

    Args:
        tags: names of the parts, in their order.
        prefix: what the prompt has already written of the response, such as ``"<think>"`` where a chat template opens
            it: it is put before each completion.
        partial: whether a completion that is not in this form gets the share of its tags, opening and closing ones,
            that stand there once.

    Raises:
        ValueError: if there are no tags, one of them stands twice, or is no name.

    Example:
        >>> TagFormat()(["?"] * 2, ["<think>a</think><answer>b</answer>", "b"])
        [1.0, 0.0]
    """

    tags: tuple[str, ...] = ("think", "answer")
    prefix: str = ""
    partial: bool = False

    def __post_init__(self) -> None:
        """Checks the options."""
        check_texts(tags=self.tags)
        check_bools(partial=self.partial)
        if not isinstance(self.prefix, str):
            raise ValueError(f"expected prefix to be a string, got {self.prefix!r}")
        if not all(tag.isidentifier() for tag in self.tags) or not self.tags or len(set(self.tags)) < len(self.tags):
            raise ValueError(f"expected tags to be different names, such as ('think', 'answer'), got {self.tags!r}")

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, completion_ids: Sequence[Any] = (), **columns: Any
    ) -> list[float | None]:
        """A value for each completion, by the contract of rewards."""
        return [self._score(self.prefix + text) for text in texts_of(completions)]

    def _score(self, text: str) -> float:
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        once = [text.count(mark) == 1 for mark in marks]
        if all(once) and self._in_order(text, marks):
            return 1.0
        return sum(once) / len(marks) if self.partial else 0.0

    def _in_order(self, text: str, marks: Sequence[str]) -> bool:
        """Whether parts with something in them alternate with nothing but whitespace, from end to end."""
        pieces: list[str] = []
        for mark in marks:
            before, present, text = text.partition(mark)
            if not present:
                return False
            pieces.append(before)
        outside, inside = [*pieces[::2], text], pieces[1::2]
        return not any(piece.strip() for piece in outside) and all(piece.strip() for piece in inside)
