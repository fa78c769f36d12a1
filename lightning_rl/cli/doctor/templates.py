"""Templates: does a chat template end turns with an EOS of the run, and what can follow an answer?"""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.cli.doctor.findings import error, fact
from lightning_rl.environments.bridge import KINDS, Bridge, BridgeError
from lightning_rl.finding import Finding
from lightning_rl.module import RLLightningModule

ANSWER = "quux"
TALK: list[dict[str, str]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": ANSWER},
]


def bridges(module: RLLightningModule) -> Iterator[Finding]:
    """Which messages the chat template lets follow an answer, in a conversation that only grows.

    Most templates write an earlier answer otherwise once another message follows, without its reasoning for example.
    That is no matter: what was said is never rendered again, only what comes between two answers.
    """
    tokenizer = module.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return
    try:
        bridge = Bridge(tokenizer, module.run.sampling.eos_token_ids or (), module.prompt_stream.template_options)
    except BridgeError as error:
        yield fact("template", f"no message can follow an answer: {error}")
        return
    wrong = {kind: bridge.check(kind) for kind in KINDS}
    right = [kind for kind, found in wrong.items() if not found]
    yield fact("template", f"in several turns, what can follow an answer: {', '.join(right) or 'nothing'}")
    for kind, found in wrong.items():
        if found:
            yield fact("template", f"no bridge over {kind} messages: {'; '.join(found)}")


def eos(module: RLLightningModule) -> Iterator[Finding]:
    """The ids that end responses hold what the chat template writes after an answer."""
    ids, tokenizer = list(module.run.sampling.eos_token_ids or ()), module.tokenizer
    names = ", ".join(_token_name(tokenizer, token) for token in ids)
    yield fact("eos", f"responses end with {names or 'a stop string alone'}")
    ending = None  # the first special token that the template writes after an answer
    if tokenizer is not None and tokenizer.chat_template:
        _, answer, after = render(tokenizer, TALK).rpartition(ANSWER)
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
