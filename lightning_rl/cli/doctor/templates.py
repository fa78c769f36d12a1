"""Templates: does a chat template end turns with an EOS of the run, and keep what it said before?"""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.cli.doctor.finding import Finding, error, fact, warning
from lightning_rl.cli.recipes import Reached
from lightning_rl.module import RLLightningModule

ANSWER = "quux"
TALK: list[dict[str, str]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": ANSWER},
]


def template_prefix(given: Reached) -> Iterator[Finding]:
    """What a chat template makes of the first messages is the beginning of what it makes of all.

    In a conversation of several turns the policy then sees the tokens that it sampled.
    """
    tokenizer = given.module.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return
    for number in range(1, len(TALK)):
        begun, longer = rendered(tokenizer, TALK[:number]), rendered(tokenizer, TALK[: number + 1])
        if not longer.startswith(begun):
            place = next(
                (at for at, pair in enumerate(zip(begun, longer, strict=False)) if len(set(pair)) > 1), len(longer)
            )
            yield warning(
                "template",
                f"the chat template writes {number} messages otherwise once another follows, from character {place}: "
                f"{begun[place : place + 24]!r} becomes {longer[place : place + 24]!r}",
                "a template that appends (for example without dropping earlier reasoning), before training on several "
                "turns; a single turn is not touched",
            )
            return


def eos(module: RLLightningModule) -> Iterator[Finding]:
    """The ids that end responses hold what the chat template writes after an answer, and no id that nobody samples."""
    ids, tokenizer = list(module.run.sampling.eos_token_ids or ()), module.tokenizer
    vocabulary = module.required_policy.model.config.get_text_config().vocab_size
    yield fact("eos", f"responses end with {', '.join(_named(tokenizer, one) for one in ids) or 'a stop string alone'}")
    unknown = [one for one in ids if not 0 <= one < vocabulary]
    if unknown:
        yield error(
            "eos", f"id {unknown[0]} ends responses, but the policy has only the ids below {vocabulary}",
            "eos_token_ids= with ids of this model, or the tokenizer that belongs to it",
        )  # fmt: skip
    ending = None if tokenizer is None or not tokenizer.chat_template else _ending(tokenizer)
    if ending is not None and ending not in ids and not module.sampling.stop:
        yield error(
            "eos",
            f"the chat template ends an answer with {_named(tokenizer, ending)}, which ends no response: answers run "
            "on to max_new_tokens",
            f"eos_token_ids={[*ids, ending]}",
        )


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """A conversation as text, without the beginning of another answer."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))


def _ending(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token that the template writes after an answer, if there is one."""
    _, found, after = rendered(tokenizer, TALK[:2]).rpartition(ANSWER)
    ids: Any = tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return next((one for one in ids if one in special), None)


def _named(tokenizer: PreTrainedTokenizerBase | None, token: int) -> str:
    return str(token) if tokenizer is None else f"{token} ({tokenizer.convert_ids_to_tokens(token)})"
