"""Prompt and response of a sample as texts with their control tokens, as the policy reads and writes them."""

from collections.abc import Iterator, Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from lightning_rl.samples import Trajectory
from lightning_rl.utils.terminal import visible

MAX_CHARACTERS = 600


def first_sample(samples: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[tuple[str, str]]:
    """Yield ``prompt`` and ``response`` of the first sample with control tokens; nothing without a tokenizer."""
    if tokenizer is None or not samples:
        return
    response = chain.from_iterable(segment.token_ids for segment in samples[0].segments)
    for name, ids in (("prompt", list(samples[0].request.prefix_ids)), ("response", list(response))):
        text = visible(str(tokenizer.decode(ids, skip_special_tokens=False)))
        yield name, f"{len(ids)} tokens: {shorten(text)!r}"


def shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text without its middle if it is longer than ``limit`` characters.

    Example:
        >>> shorten("abcdefgh", 4)
        'ab [4 characters] gh'
    """
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
