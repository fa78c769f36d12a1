"""Conversations on vLLM: samples equal those of rounds bit for bit."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
from kit.conversations import response_of, wanted
from kit.support import tiny_tokenizer
from kit.talks import TURNS, Echo, What, openings, what_was_said
from kit.vllm_models import VOCABULARY, Starter, a_model, synced, worst
from typing_extensions import override

from lightning_rl import Engine, EngineError, FinishReason, SamplingParams, VLLMEngine
from lightning_rl.environments import (
    Conversation,
    ConversationLimits,
    TokenStep,
    converse,
)
from lightning_rl.generation import Request
from lightning_rl.generation.validate_completions import Answers
from lightning_rl.samples import Trajectory


@pytest.fixture
def engine(start_engine: Starter) -> VLLMEngine:
    return synced(start_engine(a_model()), a_model())


def in_rounds(engine: VLLMEngine, talks: list[Conversation]) -> list[Trajectory]:
    """The trajectories on the schedule of the base class, which generates in rounds."""
    with patch.object(type(engine), "serve", Engine.serve):
        return converse(talks, engine, logprobs=True)


def held(engine: VLLMEngine, talks: list[Conversation], **options: Any) -> What:
    answers = Answers(engine, logprobs=True, vocabulary=VOCABULARY)
    return what_was_said(converse(talks, engine, logprobs=True, answers=answers, **options))


def test_samples_equal_those_of_rounds_for_any_schedule(engine: VLLMEngine) -> None:
    conversations = openings()
    expected = what_was_said(in_rounds(engine, conversations))
    assert {len(scores) for _, _, scores in expected} >= {TURNS} and len({ids for ids, *_ in expected}) == 16
    pairs = [pair for each in conversations for pair in each.pairs]
    assert len({len(completion.token_ids) for _, completion in pairs}) > 5
    assert worst(a_model(), [request for request, _ in pairs], [completion for _, completion in pairs]) < 1e-4
    assert held(engine, openings()) == expected
    assert held(engine, openings()[::-1])[::-1] == expected
    assert held(engine, openings(), limit=3) == expected
    synced(engine, a_model())
    with ThreadPoolExecutor(16) as executor:
        for _ in range(2):
            assert held(engine, openings(pause=0.02), executor=executor) == expected, (
                "with a cold cache, then a warm one"
            )


def test_a_turn_begins_while_others_generate(engine: VLLMEngine) -> None:
    heard: list[int] = []

    def opening(number: int, tokens: int) -> Conversation:
        sampling = SamplingParams(max_new_tokens=80, eos_token_ids=())
        first = Request(prefix_ids=(5, 6, number), sample_id=number, seed=number, sampling=sampling)
        limits = ConversationLimits(turns=4, turn_tokens=tokens)
        return Conversation(Echo(heard), wanted(first), limits, seed=number)

    converse([opening(7, 60), opening(8, 2), opening(9, 5)], engine)
    assert heard == [8, 8, 9, 8, 8, 9, 9, 9, 7, 7], "and the long one ends for its 80 tokens in its second turn"


def test_tokens_behind_a_turn_come_out_of_the_prefix_cache(engine: VLLMEngine) -> None:
    (trajectory,) = converse(openings(1, eos_token_ids=()), engine)
    whole = [*trajectory.request.prefix_ids, *response_of(trajectory)]
    once = engine._sampling_params({"temperature": 0.0, "seed": 0, "max_tokens": 1, "detokenize": False})  # noqa: SLF001
    (output,) = engine._generate([{"prompt_token_ids": whole}], [once])  # noqa: SLF001
    assert len(whole) > 96 and output.num_cached_tokens >= len(whole) // 32 * 32 - 32


def test_stop_strings_end_turns_as_in_rounds(start_engine: Starter) -> None:
    model = a_model(vocab_size=16)
    engine = synced(start_engine(model, tiny_tokenizer()), model)
    options: dict[str, Any] = {"stop": ("d", "a b"), "eos_token_ids": (1,)}

    def talks() -> list[Conversation]:
        prompts = [tuple(1 + token % 15 for token in each._wanted.request.prefix_ids) for each in openings()]  # noqa: SLF001
        sampling = SamplingParams(max_new_tokens=40, **options)
        firsts = [Request(prefix_ids=ids, sample_id=n, seed=n, sampling=sampling) for n, ids in enumerate(prompts)]
        limits = ConversationLimits(turns=4, turn_tokens=10)
        return [Conversation(Word(), wanted(each), limits) for each in firsts]

    expected = what_was_said(in_rounds(engine, talks()))
    assert any(len(turn) < 10 for _, _, turns in expected for turn in turns)
    assert what_was_said(converse(talks(), engine, logprobs=True)) == expected


class Word(Echo):
    """Environment that replies with one word."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        return TokenStep(token_ids=[3])


class Broken(Echo):
    """Environment that raises in its first turn."""

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        raise KeyboardInterrupt("enough")


@pytest.mark.parametrize("how", ["environment", "request", "answer"])
def test_a_failure_leaves_no_request_behind(engine: VLLMEngine, how: str) -> None:
    expected = held(engine, openings())
    talks = openings()
    first = talks[3]._wanted.request  # noqa: SLF001
    if how == "environment":
        talks[3] = Conversation(Broken(), wanted(first), ConversationLimits(), seed=3)
        with pytest.raises(KeyboardInterrupt, match="enough"):
            converse(talks, engine)
    elif how == "request":
        talks[3] = Conversation(Echo(), wanted(first), ConversationLimits(turn_tokens=None, turns=3), seed=3)
        long = Request(prefix_ids=(5,) * 200, sample_id=3, seed=3, sampling=first.sampling)
        talks[3] = Conversation(Echo(), wanted(long), ConversationLimits(turns=3), seed=3)
        with pytest.raises(ValueError, match=r"within 256 tokens, got 200 \+ 100 for sample 3"):
            converse(talks, engine)
    else:
        with pytest.raises(EngineError, match=r"ids in \[0, 50\), the policy's vocabulary from VLLMEngine, got"):
            converse(talks, engine, answers=Answers(engine, logprobs=False, vocabulary=50))
    assert engine._llm.llm_engine.get_num_unfinished_requests() == 0  # noqa: SLF001
    assert held(engine, openings()) == expected
