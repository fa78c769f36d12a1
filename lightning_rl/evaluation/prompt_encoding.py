"""Encoding of prompts for evaluations and single questions."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.data import Prompt, PromptDataset, PromptSource
from lightning_rl.data.row_schema import ColumnCheck
from lightning_rl.policy.build import max_prompt_length


def encode_prompts(
    source: PromptDataset | PromptSource,
    tokenizer: PreTrainedTokenizerBase | None,
    model: PreTrainedModel,
    max_new_tokens: int,
    check: ColumnCheck | None = None,
) -> tuple[Prompt, ...]:
    """Return every prompt of a source in order.

    Raises:
        ValueError: If a prompt is empty, too long, or does not fit tokenizer or model.
    """
    prompts = source if isinstance(source, PromptDataset) else PromptDataset(source)
    vocabulary = model.config.get_text_config().vocab_size
    prompts.connect(tokenizer, max_prompt_length(model, max_new_tokens), vocabulary, check)
    return tuple(prompts.prompts(range(len(prompts))))


def is_single(prompts: Any) -> bool:
    """Return True for a single prompt (a text, a row, token ids, or chat messages), False for a sequence of prompts.

    Example:
        >>> is_single("hi"), is_single(["hi"]), is_single([2, 3]), is_single([[2, 3]])
        (True, False, True, False)
        >>> is_single([{"role": "user", "content": "hi"}]), is_single([{"prompt": "hi"}])
        (True, False)
    """
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    return all(isinstance(part, int) for part in prompts) or all(
        isinstance(part, Mapping) and "role" in part for part in prompts
    )
