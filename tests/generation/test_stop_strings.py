"""Stop strings: what ends a response beside its EOS, and what they need."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.engine_requests import launch, request_of
from kit.support import VOCABULARY, tiny_policy, tiny_tokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_rl import FinishReason, TransformersEngine


def continued(
    model: PreTrainedModel, prompt: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None, **options: Any
) -> tuple[tuple[int, ...], FinishReason]:
    engine = TransformersEngine()
    launch(engine, model, tokenizer)
    engine.load_weights([], 0)
    (found,) = engine.generate([request_of(prompt, temperature=0.0, **options)])
    return found.token_ids, found.finish


def counting(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A policy that counts: its likeliest next id is the last one plus 1."""
    return saying(lambda last: (last + 1) % VOCABULARY, VOCABULARY, monkeypatch)


def saying(after: Callable[[Tensor], Tensor], vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    model = tiny_policy(vocab_size=vocabulary)
    forward: Callable[..., dict[str, Tensor]] = model.forward

    def next_id(*, input_ids: Any, **given: Any) -> dict[str, Tensor]:
        output = forward(input_ids=input_ids, **given)
        output["logits"] = torch.nn.functional.one_hot(
            after(input_ids[:, -output["logits"].shape[1] :]), vocabulary
        ).float()
        return output

    monkeypatch.setattr(model, "forward", next_id)
    return model


@pytest.mark.parametrize(
    ("stop", "ids", "finish"),
    [
        pytest.param(("d",), (2, 3, 4, 5), FinishReason.STOP, id="one-token"),
        pytest.param(("b c",), (2, 3, 4), FinishReason.STOP, id="over-two-tokens"),
        pytest.param(("zz", "c d"), (2, 3, 4, 5), FinishReason.STOP, id="one-of-several"),
        pytest.param(("zz",), (2, 3, 4, 5, 6, 7), FinishReason.LENGTH, id="never-said"),
        pytest.param(("a b c d e f",), (2, 3, 4, 5, 6, 7), FinishReason.STOP, id="the-whole-response"),
    ],
)
def test_a_stop_string_ends_the_response_and_belongs_to_it(
    stop: tuple[str, ...], ids: tuple[int, ...], finish: FinishReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = continued(counting(monkeypatch), (15, 1), tiny_tokenizer(), stop=stop, max_new_tokens=6)
    assert found == (ids, finish)


def test_a_stop_string_in_the_prompt_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = continued(counting(monkeypatch), (2, 3), tiny_tokenizer(), stop=("b c",), max_new_tokens=2)
    assert found == ((4, 5), FinishReason.LENGTH)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    words = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="!"))
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_stop_string_is_found_when_each_of_its_letters_is_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of ASCII a letter may be two to four tokens, so the tail is counted in bytes."""
    tokenizer, stop = byte_tokenizer(), "\u0431\u0441" * 6
    words = tokenizer.get_vocab()
    cycle = [words[letter] for letter in "\u00d0\u00b1\u00d1\u0123"]
    after = torch.full((256,), cycle[0])
    after[cycle] = torch.tensor(cycle).roll(-1)

    found = continued(
        saying(lambda last: after[last], 256, monkeypatch), (5,), tokenizer, stop=(stop,), max_new_tokens=40
    )
    assert found == (tuple(cycle * 6), FinishReason.STOP)
