"""Check that a chat template ends turns with an EOS token of the run, and list messages that can follow."""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.cli.doctor.findings import error, fact
from lightning_rl.environments.chat_template import KINDS, Bridge, BridgeError
from lightning_rl.module import RLLightningModule
from lightning_rl.utils.finding import Finding

ANSWER = "quux"
TALK: list[dict[str, str]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": ANSWER},
]


def bridges(module: RLLightningModule) -> Iterator[Finding]:
    """Report the messages that the chat template allows after an answer without changing earlier tokens.

    Most templates render an earlier answer differently once a message follows, for example without its reasoning. Only
    the text between two answers matters, because earlier turns are never rendered again.
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
    right = [kind for kind, reasons in wrong.items() if not reasons]
    yield fact("template", f"messages that can follow an answer: {', '.join(right) or 'none'}")
    for kind, reasons in wrong.items():
        if reasons:
            yield fact("template", f"{kind} messages cannot follow an answer: {'; '.join(reasons)}")


def eos(module: RLLightningModule) -> Iterator[Finding]:
    """Check that the ids that end responses include the token that the chat template writes after an answer."""
    ids, tokenizer = list(module.run.sampling.eos_token_ids or ()), module.tokenizer
    names = ", ".join(_token_name(tokenizer, token) for token in ids)
    yield fact("eos", f"responses end with {names or 'a stop string only'}")
    ending = None  # the first special token that the template writes after an answer
    if tokenizer is not None and tokenizer.chat_template:
        _, answer, after = render(tokenizer, TALK).rpartition(ANSWER)
        written: Any = tokenizer(after, add_special_tokens=False)["input_ids"] if answer else []
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ending = next((token for token in written if token in special), None)
    if ending is not None and ending not in ids and not module.sampling.stop:
        name = _token_name(tokenizer, ending)
        observed = f"the chat template ends an answer with {name}, which does not end a response: answers continue"
        yield error("eos", f"{observed} to max_new_tokens", f"eos_token_ids={[*ids, ending]}")


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Render a conversation without a generation prompt."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False))


def _token_name(tokenizer: PreTrainedTokenizerBase | None, token: int) -> str:
    return str(token) if tokenizer is None else f"{token} ({tokenizer.convert_ids_to_tokens(token)})"
