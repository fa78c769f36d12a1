"""One prompt and one response of a rollout as texts with their control tokens, as the policy reads and writes them."""

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from lightning_rl.rollout import Rollout
from lightning_rl.utils.terminal import visible

MAX_CHARACTERS = 600


def first_sample(rollout: Rollout, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[tuple[str, str]]:
    """Yield ``prompt`` and ``response`` of the first row, decoded with control tokens; nothing without a tokenizer."""
    if tokenizer is None or not len(rollout):
        return
    lengths = {"prompt": int(rollout.prompt_lengths[0]), "response": int(rollout.response_lengths[0])}
    for name, ids in (("prompt", rollout.prompt_ids[0]), ("response", rollout.response_ids[0])):
        text = visible(str(tokenizer.decode(ids[: lengths[name]].tolist(), skip_special_tokens=False)))
        yield name, f"{lengths[name]} tokens: {shorten(text)!r}"


def shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text without its middle if it is longer than ``limit`` characters.

    Example:
        >>> shorten("abcdefgh", 4)
        'ab [4 characters] gh'
    """
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
