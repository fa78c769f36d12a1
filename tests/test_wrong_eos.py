"""A wrong EOS: the token that the chat template writes after an answer has to end a response of a chat."""

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
from environments.templates import FAMILIES, close_of, tokenizer_of
from kit.support import fit, tiny_module, tiny_tokenizer

from lightning_rl import Evaluation, PromptDataModule, SamplingParams
from lightning_rl.data import Prompt
from lightning_rl.run.prompts import wrong_eos

ENDS_OF_ANSWERS = {
    "gpt-oss": "<|return|>",
    "gemma-3": "<end_of_turn>",
    "llama-3.1": "<|eot_id|>",
    "mistral": "</s>",
    "phi-3.5": "<|end|>",
    "qwen3": "<|im_end|>",
}
ONE = SamplingParams(eos_token_ids=[0])


def prompt_of(content: Any, ids: tuple[int, ...] = (1,)) -> Prompt:
    return Prompt(index=0, token_ids=ids, content=content, columns={})


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_of_templates_ends_an_answer_with_another_token_than_its_own(name: str) -> None:
    tokenizer, close = tokenizer_of(name), sorted(close_of(name))
    assert wrong_eos(SamplingParams(eos_token_ids=close), tokenizer) is None


@pytest.mark.parametrize("name", ENDS_OF_ANSWERS)
def test_an_eos_other_than_the_end_of_the_chat_template_is_found_for_chats_alone(name: str) -> None:
    tokenizer, chat = tokenizer_of(name), prompt_of([{"role": "user", "content": "one"}])
    end = tokenizer.convert_tokens_to_ids(ENDS_OF_ANSWERS[name])
    other = SamplingParams(eos_token_ids=[399])
    for prompt in (None, chat, prompt_of("a rendered chat", (5, end, 6)), prompt_of([5, end], (5, end))):
        fault = wrong_eos(other, tokenizer, prompt)
        assert fault is not None and fault.severity == "error"
        assert f"ends an answer with {end} ({ENDS_OF_ANSWERS[name]}), which does not end" in fault.observed
        assert fault.cure == f"eos_token_ids=[399, {end}]"
    assert wrong_eos(other, tokenizer, prompt_of("plain text of a base model", (5, 6))) is None
    assert wrong_eos(replace(other, stop=["Question:"]), tokenizer, chat) is not None
    ending = str(tokenizer.convert_ids_to_tokens(end))
    assert wrong_eos(replace(other, stop=["Question:", ending]), tokenizer, chat) is None
    assert wrong_eos(SamplingParams(eos_token_ids=[end]), tokenizer, chat) is None


def test_without_a_template_or_an_end_in_it_no_eos_is_wrong() -> None:
    tokenizer = tiny_tokenizer()
    assert wrong_eos(ONE, None) is None and wrong_eos(ONE, tokenizer) is None
    for template in ("{{ messages[0].content }}", "{{ raise_exception('no chats') }}", "quux quux </s>", "quux a"):
        tokenizer.chat_template = template
        assert (wrong_eos(ONE, tokenizer) is not None) == ("quux" in template)


def test_a_template_that_ends_no_answer_is_found_for_chats_alone() -> None:
    tokenizer, chat = copy.deepcopy(tokenizer_of("qwen3")), prompt_of([{"role": "user", "content": "one"}])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    fault = wrong_eos(ONE, tokenizer, chat)
    assert fault is not None and fault.severity == "warning" and "no token that ends a response" in fault.observed
    newline = tokenizer("\n")["input_ids"]
    fits = [SamplingParams(eos_token_ids=newline), replace(ONE, stop=["\n"])]
    assert [wrong_eos(one, tokenizer, chat) for one in fits] == [None, None]
    assert wrong_eos(ONE, tokenizer, prompt_of("plain text")) is None


def test_a_fit_warns_of_a_template_that_ends_no_answer() -> None:
    tokenizer, rows = tiny_tokenizer(), [{"prompt": [{"role": "user", "content": "a"}]}] * 4
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with pytest.warns(UserWarning, match="no token that ends a response: .* tokenizer.chat_template that writes"):
        fit(tiny_module(tokenizer=tokenizer), data=PromptDataModule(rows, 4), limit_train_batches=1)


@pytest.mark.parametrize("evaluated", [False, True], ids=["training", "evaluation"])
def test_a_fit_warns_once_of_a_wrong_eos(evaluated: bool) -> None:
    tokenizer, rows = tiny_tokenizer(), [{"prompt": [{"role": "user", "content": "a"}]}] * 4
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} </s> {% endfor %}"
    wrong = SamplingParams(max_new_tokens=2, eos_token_ids=[3])
    options: dict[str, Any] = {"eos_token_ids": wrong.eos_token_ids}
    if evaluated:
        options = {"evaluation": Evaluation("held_out", rows, sampling=replace(wrong, temperature=0.0))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tiny_module(tokenizer=tokenizer, **options), data=PromptDataModule(rows, 4), limit_train_batches=1)
    texts = [str(warning.message) for warning in caught if "ends an answer with" in str(warning.message)]
    assert [text.rpartition("; ")[2] for text in texts] == ["pass sampling=SamplingParams(eos_token_ids=[3, 1], ...)"]
