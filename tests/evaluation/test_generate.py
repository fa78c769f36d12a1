"""Answers to single questions, with a Trainer and without one."""

from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_prompts, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from lightning_rl import FakeEngine, RLLightningModule, SamplingParams
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.generation import Request

CHAT = [{"role": "user", "content": "c d"}]


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}b"
    return tokenizer


def echo(request: Request) -> list[int]:
    return [*request.prefix_ids, 1]


def echoing(**options: Any) -> RLLightningModule:
    return tiny_module(engine=FakeEngine(echo), tokenizer=chat_tokenizer(), **options)


@pytest.mark.parametrize(
    ("prompts", "answers"),
    [
        ("a b", "a b"),
        (["a b", "c"], ["a b", "c"]),
        (["a b"], ["a b"]),
        (CHAT, "c d b"),
        ([CHAT, CHAT], ["c d b", "c d b"]),
        ([2, 3], "a b"),
        ((2, 3), "a b"),
        ([[2, 3], [4]], ["a b", "c"]),
        ({"prompt": "a", "answer": "b"}, "a"),
        ([{"prompt": "a"}, {"prompt": CHAT}], ["a", "c d b"]),
    ],
)
def test_every_form_of_prompt_is_answered_in_its_form_before_there_is_a_trainer(prompts: Any, answers: Any) -> None:
    module = echoing()
    assert module.generate(prompts) == answers
    fit(module, max_steps=1)
    assert module.generate(prompts) == answers


def test_several_samples_come_as_a_list_for_each_prompt() -> None:
    numbers: list[int] = []

    def count(request: Request) -> list[int]:
        numbers.append(request.seed)
        return [1 + len(numbers)]

    module = tiny_module(engine=FakeEngine(count), tokenizer=tiny_tokenizer())
    assert module.generate("a", samples=3, temperature=1.0) == ["a", "b", "c"]
    assert module.generate(["a", "b"], samples=2, temperature=1.0) == [["d", "e"], ["f", "g"]]
    assert module.generate(["a"], samples=1) == [["h"]]
    assert len(set(numbers[:3])) == 3


def test_sampling_is_taken_as_it_is_and_ends_at_eos() -> None:
    engine = FakeEngine(echo)
    module = tiny_module(engine=engine)
    module.generate([2], sampling=SamplingParams(temperature=0.5, max_new_tokens=3))
    module.generate([2])
    first, second = [request.sampling for request in engine.requests]
    assert (first.temperature, first.max_new_tokens, first.eos_token_ids) == (0.5, 3, (1,))
    assert (second.temperature, second.max_new_tokens, second.eos_token_ids) == (0.0, 8, (1,))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([2], {"samples": 2}, "expected random sampling for samples=2, got temperature=0, .* raise temperature"),
        ([2], {"samples": 0}, "expected samples to be a whole number above 0, got 0"),
        ([2], {"sampling": SamplingParams(), "temperature": 1.0}, r"expected sampling= or temperature=1.0, got both"),
        ([2], {"sampling": SamplingParams(top_k=2)}, "expected an engine that supports top_k=2"),
        ([], {}, "expected at least one prompt, got none"),
        ([[2], []], {}, "expected prompt 1 to have at least one token"),
        ([2] * 60, {}, "expected prompts of at most 56 tokens"),
        ([99], {}, r"expected token ids in \[0, 16\)"),
    ],
)
def test_what_cannot_be_answered_is_said(prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        echoing().generate(prompts, **options)


def test_a_policy_that_answered_first_trains_as_one_that_did_not() -> None:
    def weights(*, answers: bool, **options: Any) -> dict[str, torch.Tensor]:
        module = tiny_module(**options)
        if answers:
            module.generate([[2], [3]], samples=2, temperature=1.0)
        fit(module)
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    before, after = weights(answers=False), weights(answers=True)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_that_generates_ahead_takes_the_policy_that_answered() -> None:
    module = tiny_module(max_staleness=1)
    module.generate([[2], [3]])
    assert module.models.replica is None
    fit(module, callbacks=[TruncatedIS()])
    assert module.models.replica is not None and module.options.engine.holds_copy


def test_a_fit_in_bf16_takes_the_policy_that_answered() -> None:
    module = tiny_module()
    assert len(module.generate([[2], [3]])) == 2
    fit(module, precision="bf16-true", data=tiny_prompts(4, 4))
    assert module.required_policy.model.dtype == torch.bfloat16


def test_a_call_gives_the_same_texts_each_time_and_samples_differ() -> None:
    module = tiny_module(tokenizer=tiny_tokenizer())
    texts = module.generate("a b", samples=4, temperature=1.0)
    assert module.generate("a b", samples=4, temperature=1.0) == texts and len(set(texts)) > 1
    assert module.generate("a b", temperature=1.0) == texts[0]
