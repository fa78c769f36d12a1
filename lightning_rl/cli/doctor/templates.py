"""Templates: does a chat template end turns with an EOS of the run, and keep what it said before?"""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.cli.doctor.findings import error, fact, warning
from lightning_rl.cli.recipes import Recipe
from lightning_rl.finding import Finding
from lightning_rl.module import RLLightningModule

ANSWER = "quux"
TALK: list[dict[str, str]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": ANSWER},
]


def template_prefix(recipe: Recipe) -> Iterator[Finding]:
    """What a chat template makes of the first messages is the beginning of what it makes of all.

    In a conversation of several turns the policy then sees the tokens that it sampled.
    """
    tokenizer = recipe.module.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return
    for number in range(1, len(TALK)):
        before, after = render(tokenizer, TALK[:number]), render(tokenizer, TALK[: number + 1])
        if not after.startswith(before):
            pairs = enumerate(zip(before, after, strict=False))
            place = next((at for at, (one, other) in pairs if one != other), len(after))
            yield warning(
                "template",
                f"the chat template writes {number} messages otherwise once another follows, from character {place}: "
                f"{before[place : place + 24]!r} becomes {after[place : place + 24]!r}",
                "a template that appends (for example without dropping earlier reasoning), before training on several "
                "turns; a single turn is not touched",
            )
            return


def eos(module: RLLightningModule) -> Iterator[Finding]:
    """The ids that end responses hold what the chat template writes after an answer."""
    ids, tokenizer = list(module.run.sampling.eos_token_ids or ()), module.tokenizer
    names = ", ".join(_token_name(tokenizer, token) for token in ids)
    yield fact("eos", f"responses end with {names or 'a stop string alone'}")
    ending = None  # the first special token that the template writes after an answer
    if tokenizer is not None and tokenizer.chat_template:
        _, answer, after = render(tokenizer, TALK[:2]).rpartition(ANSWER)
        written: Any = tokenizer(after, add_special_tokens=False)["input_ids"] if answer else []
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ending = next((token for token in written if token in special), None)
    if ending is not None and ending not in ids and not module.sampling.stop:
        name = _token_name(tokenizer, ending)
        observed = f"the chat template ends an answer with {name}, which ends no response: answers run on"
        yield error("eos", f"{observed} to max_new_tokens", f"eos_token_ids={[*ids, ending]}")


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """A conversation as text, without the beginning of another answer."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))


def _token_name(tokenizer: PreTrainedTokenizerBase | None, token: int) -> str:
    return str(token) if tokenizer is None else f"{token} ({tokenizer.convert_ids_to_tokens(token)})"
