"""Stray control tokens and unread columns of prompts are warned of; what templates write is not."""

import re
from typing import Any

import pytest
from environments.templates import FAMILIES, close_of, tokenizer_of
from kit.support import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from lightning_rl.data import PromptDataset
from lightning_rl.data.prompt_checks import prompt_findings

CHAT = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<s> b{% endif %}"
USER = {"role": "user", "content": "a"}


def adding(single: str, template: str | None = CHAT) -> Any:
    """A tokenizer with BOS ``<s>``, and a post-processor that adds tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "sep_token": "<sep>"})
    marks = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>", "<sep>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=marks)
    tokenizer.chat_template = template
    return tokenizer


def observed(tokenizer: Any, row: Any, ends: Any = (1,), **options: Any) -> list[str]:
    data = PromptDataset([row], **options)
    data.connect(tokenizer)
    return [f"{one.observed}: {one.cure}" for one in prompt_findings(data.examples(8), tokenizer, ends)]


@pytest.mark.parametrize(
    ("single", "row", "message"),
    [
        ("<s> $A", "<s> a b", "prompt 0 begins with <s> twice: pass messages"),
        (
            "<s> $A </s>",
            "a b",
            "prompt 0 ends with </s>, .*: the tokenizer appends it: set tokenizer.add_eos_token=Fal",
        ),
        ("<s> $A <sep>", "a b", "prompt 0 ends with <sep>, .*: the tokenizer appends it"),
        ("<s> $A", "a </s>", "prompt 0 ends with </s>, .*: leave it out of the prompt"),
        ("$A", [3, 4, 1], "prompt 0 ends with </s>, .*: leave it out of the prompt"),
        ("$A", [{"role": "user", "content": "a <s>"}], "prompt 0 has the control token <s> in the text of a message"),
        (
            "$A",
            {"prompt": "a", "tools": [{"name": "a"}]},
            "prompt 0 has a column tools, but no chat template writes it",
        ),
        ("$A", {"prompt": [3], "chat_template_kwargs": {"x": 1}}, "prompt 0 has a column chat_template_kwargs, but no"),
        ("$A", {"prompt": [USER], "image": "x.png"}, "prompt 0 has a column image, and the policy reads text alone"),
        ("$A", {"prompt": "a", "images": [b"x"]}, "prompt 0 has a column images, and the policy reads text alone"),
    ],
)
def test_what_is_stray_in_a_prompt_is_told(single: str, row: Any, message: str) -> None:
    (text,) = observed(adding(single), row)

    assert re.match(message, text), text


def test_a_chat_template_without_the_head_of_an_answer_is_told() -> None:
    tokenizer = adding("<s> $A", "{% for m in messages %}{{ m['content'] }} </s>{% endfor %}")
    (text,) = observed(tokenizer, [USER])
    assert "ends with </s>" in text and "the chat template writes no head of an answer" in text


@pytest.mark.parametrize("row", ["a b", [USER], {"prompt": [USER], "tools": None, "image": None}, [3, 4]], ids=str)
def test_a_usual_prompt_has_no_finding(row: Any) -> None:
    assert observed(adding("<s> $A"), row) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_of_each_family_has_no_finding(name: str) -> None:
    tokenizer = tokenizer_of(name)
    assert observed(tokenizer, [{"role": "user", "content": "one <think> two"}], close_of(name)) == []
    whole = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    again = observed(tokenizer, [{"role": "user", "content": whole}], close_of(name))
    assert len(again) == 1 and "in the text of a message" in again[0]


def test_without_a_tokenizer_nothing_is_stray() -> None:
    assert observed(None, [3, 1]) == []
