"""Warnings about what the policy reads: doubled or stray control tokens, and columns that nothing reads."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.data.pictures import COLUMNS
from lightning_rl.data.row_schema import TOOLS, VARIABLES, is_token_ids
from lightning_rl.policy.processor import processor_of
from lightning_rl.samples import Prompt
from lightning_rl.utils.decoding import ROLES
from lightning_rl.utils.finding import Finding


def prompt_findings(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None, ends: Collection[int]
) -> list[Finding]:
    """Return a warning for each kind of fault, with the first of the prompts that has it.

    Args:
        prompts: Some prompts of a run.
        tokenizer: Tokenizer of the policy.
        ends: Ids that end a response.
    """
    kinds: dict[str, Finding] = {}
    for prompt in prompts:
        for kind, observed, cure in _faults(prompt, tokenizer, ends):
            kinds.setdefault(
                kind,
                Finding(check="prompt", observed=f"prompt {prompt.index} {observed}", cure=cure, severity="warning"),
            )
    return list(kinds.values())


def _faults(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, ends: Collection[int]
) -> Iterator[tuple[str, str, str]]:
    """Yield kind, observation and cure of the faults of a prompt."""
    chat = not isinstance(prompt.content, str) and not is_token_ids(prompt.content)
    unread = [name for name in (TOOLS, VARIABLES) if not chat and prompt.columns.get(name)]
    for name in unread:
        why = f"has a column {name}, but no chat template writes it"
        yield name, why, "pass chat=True, messages as the prompt, or drop the column"
    for name in COLUMNS if processor_of(tokenizer) is None else ():
        if prompt.columns.get(name) is not None:
            cure = "pass tokenizer=AutoProcessor.from_pretrained(...) of the policy, or drop the column"
            yield name, f"has a column {name}, and the policy reads text alone", cure
    if tokenizer is not None:
        yield from _stray_tokens(prompt, tokenizer, ends, chat=chat)


def _stray_tokens(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, ends: Collection[int], *, chat: bool
) -> Iterator[tuple[str, str, str]]:
    ids, bos = list(prompt.token_ids), tokenizer.bos_token_id
    whole = "pass messages, so that the chat template writes the tokens, or leave them out of the text"
    if bos is not None and ids[:2] == [bos, bos]:
        yield "bos", f"begins with {tokenizer.bos_token} twice", whole
    appended = _added_tokens(prompt.content, tokenizer) if isinstance(prompt.content, str) else []
    if appended or ids[-1] in {*ends, tokenizer.eos_token_id}:
        name = tokenizer.decode(appended or ids[-1:])
        who = "the tokenizer appends it: set tokenizer.add_eos_token=False, or correct its post-processor"
        if not appended:
            who = "the chat template writes no head of an answer: correct it" if chat else "leave it out of the prompt"
        yield "end", f"ends with {name}, which ends a text, so the policy answers after an end", who
    for text in _texts(prompt.content) if chat else ():
        if written := [token for token in _control(tokenizer) if token in text]:
            observed = (
                f"has the control token {written[0]} in the text of a message, as of a chat that was rendered before"
            )
            yield "text", observed, "pass the messages themselves, and no text that a template has written"
            return


def _added_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer's post-processor adds after a text."""
    ids, plain = (list(tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (True, False))
    start = next((place for place in range(len(ids)) if ids[place : place + len(plain)] == plain), len(ids))
    return ids[start + len(plain) :] if plain else []


def _control(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens that the chat template writes, or that begin or end texts."""
    roles, template = {getattr(tokenizer, role, None) for role in ROLES}, str(tokenizer.chat_template)
    tokens = tokenizer.added_tokens_decoder.items()
    special = [
        (number, token.content) for number, token in tokens if token.special and number != tokenizer.unk_token_id
    ]
    return [content for number, content in special if number in roles or content in template]


def _texts(messages: Any) -> list[str]:
    return [message["content"] for message in messages if isinstance(message.get("content"), str)]


def is_chat(prompt: Prompt | None, ending: int | None = None) -> bool:
    """Return True for chat messages or None, and for a prompt with the token after which a template ends messages."""
    return (
        prompt is None
        or not (isinstance(prompt.content, str) or is_token_ids(prompt.content))
        or ending in prompt.token_ids
    )
