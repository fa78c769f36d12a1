"""Sample: identities of samples and groups, columns, filtered groups that are replaced, prompts dealt out to ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit.engine_requests import request_of
from kit.support import fill_rollout, parity_reward, sample_groups, tiny_module, tiny_tokenizer
from torch import Tensor
from typing_extensions import override

from lightning_rl import EngineError, FakeEngine, FinishReason, PromptDataModule, RLCallback, Rollout, SamplingParams
from lightning_rl.callbacks import NoEOSMask, OverlongPenalty
from lightning_rl.corrections import Corrections
from lightning_rl.data import Prompt
from lightning_rl.environments.parsing import plain_text
from lightning_rl.generation import Completion, Request
from lightning_rl.rewards import Rewards, TagFormat
from lightning_rl.rollouts.collector import Collector, RepeatedPromptError, distribute_prompts

G = 3
Keep = Callable[[Rollout], Tensor]


class Keeping(RLCallback):
    """Keeps what a function says, and the rollouts that it was asked about."""

    name = "keeping"

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.seen: list[Rollout] = []

    @override
    def keep_groups(self, rollout: Rollout) -> Tensor:
        self.seen.append(rollout)
        return self.keep(rollout)


class OddSamplesOnly(RLCallback):
    """Takes even samples out of the reward."""

    name = "odd"

    @override
    def reward_mask(self, rollout: Rollout) -> Tensor:
        return rollout.sample_ids % 2 == 1


def answer(request: Request) -> list[int]:
    return [2 + request.sample_id % 5] * (1 + request.sample_id % 3) + [1]


def test_every_token_keeps_the_version_that_drew_it() -> None:
    def said(request: Request) -> Completion:
        length = 2 + request.sample_id % 2
        mixed = (3, 4, 4)[:length] if request.sample_id % 2 else None
        return Completion(
            token_ids=(5,) * length, logprobs=torch.zeros(length), finish=FinishReason.LENGTH, version=3, versions=mixed
        )

    collector = collector_of(script=said)
    collector.engine.version = 3  # when it is asked; version 4 comes while it generates
    rollout, _ = fill_rollout(collector, stream().take, 1, 4)
    assert rollout.policy_version.tolist() == [[3, 3, -1], [3, 4, 4], [3, 3, -1]]
    with pytest.raises(ValueError, match="expected a version for each of 2 tokens, got 1"):
        Completion(token_ids=(5, 6), logprobs=None, finish=FinishReason.STOP, version=1, versions=(1,))


def collector_of(
    *callbacks: RLCallback, script: Any = answer, rewards: Any = (parity_reward,), **options: Any
) -> Collector:
    known: dict[str, Any] = {
        "engine": FakeEngine(script), "tokenizer": None, "rewards": Rewards(rewards),
        "corrections": Corrections(callbacks), "group_size": G, "seed": 11,
        "sampling": SamplingParams(temperature=0.7, max_new_tokens=9, eos_token_ids=[1], stop=("x",)),
    }  # fmt: skip
    built = Collector(**{**known, **options})
    for version in range(7):
        built.engine.load_weights([], version)
    return built


def stream(number: int = 50) -> PromptDataModule:
    rows = [{"prompt": [2 + n % 7] * (1 + n % 3), "answer": n} for n in range(number)]
    data = PromptDataModule(rows, 1, shuffle=False)
    data.connect(None, None)
    return data


def test_a_sample_is_known_by_its_prompt_and_its_number_in_the_group() -> None:
    data, collector = stream(), collector_of()
    for first in (0, 2):  # the index goes on from rollout to rollout
        rollout, _ = fill_rollout(collector, data.take, 2, first)
        indices = [first, first + 1]
        assert rollout.groups.tolist() == [index for index in indices for _ in range(G)]
        assert rollout.sample_ids.tolist() == [index * G + j for index in indices for j in range(G)]


def test_requests_carry_everything_that_decides_a_sample() -> None:
    collector = collector_of()
    fill_rollout(collector, stream().take, 2, 4)
    again = collector_of()
    fill_rollout(again, stream().take, 2, 5)
    engine, other = collector.engine, again.engine
    assert isinstance(engine, FakeEngine) and isinstance(other, FakeEngine)
    requests = engine.requests
    assert [request.prefix_ids for request in requests] == [(2,)] * G + [(3, 3)] * G
    sampling = SamplingParams(max_new_tokens=9, temperature=0.7, eos_token_ids=[1], stop=("x",))
    assert {request.sampling for request in requests} == {sampling}
    seeds = [request.seed for request in (*requests, *other.requests)]
    assert len(set(seeds)) == 4 * G, "another sample and another rollout have other random numbers"


def test_completions_become_padded_rows_with_their_masks() -> None:
    def said(request: Request) -> Completion:
        length, finish = [(2, FinishReason.STOP), (4, FinishReason.LENGTH), (0, FinishReason.ABORT)][request.sample_id]
        return Completion(token_ids=(5,) * length, logprobs=torch.full((length,), -0.5), finish=finish, version=6)

    rollout, _ = fill_rollout(collector_of(script=said), stream().take, 1)
    assert rollout.response_ids.tolist() == [[5, 5, 0, 0], [5] * 4, [0] * 4]
    assert rollout.response_lengths.tolist() == [2, 4, 0] and rollout.prompt_lengths.tolist() == [1] * G
    assert rollout.action_mask.sum(-1).tolist() == rollout.valid_tokens.sum(-1).tolist() == [2, 4, 0]
    assert rollout.policy_version.tolist() == [[6, 6, -1, -1], [6] * 4, [-1] * 4]
    assert rollout.rollout_logprobs is not None
    assert rollout.rollout_logprobs.tolist() == [[-0.5, -0.5, 0, 0], [-0.5] * 4, [0] * 4]
    assert rollout.finish.tolist() == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT]
    assert rollout.trained.tolist() == [True, True, False], "an aborted sample is not trained on"


def test_columns_are_joined_to_their_prompts_and_missing_ones_are_none() -> None:
    seen: dict[str, Any] = {}

    def reading(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0] * len(prompts)

    prompts = [Prompt(7, (2,), "two", {"answer": "b"}), Prompt(3, (3,), "three", {"level": 4})]
    sample_groups(collector_of(rewards=[reading], tokenizer=tiny_tokenizer()), prompts)
    assert seen["prompts"] == ["two"] * G + ["three"] * G
    assert seen["answer"] == ["b"] * G + [None] * G and seen["level"] == [None] * G + [4] * G
    assert seen["completion_ids"][0] == answer(request_of((2,), 21))
    assert seen["completions"][0] == "b", "EOS is no text"


def test_special_tokens_are_text_unless_they_end_or_fill_a_response() -> None:
    tokenizer = tiny_tokenizer()
    tags = ["<think>", "</think>", "<answer>", "</answer>", "<end>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags, "pad_token": "<pad>"})
    number = tokenizer.get_vocab()
    ids = [number[word] for word in ("<think>", "a", "</think>", "<answer>", "b", "</answer>")]
    ends = [number[word] for word in ("<end>", "</s>", "<pad>")]
    sampling = SamplingParams(eos_token_ids=ends[:1])
    text = collector_of(tokenizer=tokenizer, sampling=sampling).texts([[*ids, *ends]])[0]
    assert text.split() == ["<think>", "a", "</think>", "<answer>", "b", "</answer>"]
    assert TagFormat()(["?"], [text]) == [1.0]
    assert plain_text(tokenizer, ends)(ids + ends, (), ()).text == text
    assert collector_of(tokenizer=tokenizer).texts([ends[:1]])[0] == "<end>", "which ends no response of this run"


def test_the_texts_of_a_round_are_decoded_in_one_call_that_inspects_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, calls, seen = tiny_tokenizer(), list[tuple[type, int]](), list[str]()
    decode = type(tokenizer).decode

    def watched(self: Any, token_ids: Any, **options: Any) -> Any:
        calls.append((type(token_ids), len(token_ids)))
        return decode(self, token_ids, **options)

    def reading(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(prompts)

    monkeypatch.setattr(type(tokenizer), "decode", watched)
    rollout = sample_groups(collector_of(rewards=[reading], tokenizer=tokenizer), stream().take(3))
    assert calls == [(np.ndarray, len(rollout))]
    rows = zip(rollout.response_ids.tolist(), rollout.response_lengths.tolist(), strict=True)
    assert seen == [tokenizer.decode(ids[:length], skip_special_tokens=True) for ids, length in rows]


@pytest.mark.parametrize(
    ("logprobs", "got"), [(None, "none"), (torch.zeros(1), "1"), (torch.zeros(3), "3")], ids=["none", "short", "long"]
)
def test_an_engine_that_does_not_give_every_log_probability_is_refused(logprobs: Tensor | None, got: str) -> None:
    faulty = Completion(token_ids=(5, 1), logprobs=logprobs, finish=FinishReason.STOP, version=6)
    with pytest.raises(EngineError, match=rf"for each of 2 tokens from FakeEngine, got .*{got}\]? for sample 0"):
        fill_rollout(collector_of(script=lambda _: faulty), stream().take, 1)
    silent = FakeEngine(lambda _: faulty, returns_logprobs=False)
    fill_rollout(collector_of(engine=silent), stream().take, 1)  # not asked for


def test_no_prompts_give_no_rows_with_the_same_fields() -> None:
    collector = collector_of()
    none, some = sample_groups(collector, []), sample_groups(collector, stream().take(1))
    assert len(none) == 0 and [name for name, _ in none.tensors()] == [name for name, _ in some.tensors()]


def test_rows_that_a_mask_or_a_reward_takes_out_of_the_reward_stay_in_training() -> None:
    def applies_to_some(prompts: Sequence[Any], completions: Sequence[str], **_: Any) -> list[float | None]:
        return [None if place == 3 else 1.0 for place in range(len(prompts))]

    collector = collector_of(OddSamplesOnly(), rewards=[applies_to_some])
    with pytest.warns(UserWarning, match="no reward function applies"):
        rollout, _ = fill_rollout(collector, stream().take, 2)
    assert rollout.rewarded.tolist() == [False, True, False, False, False, True] and rollout.trained.all()


def test_filtered_groups_are_replaced_by_the_next_prompts() -> None:
    keeping, data = Keeping(lambda rollout: rollout.groups % 3 == 0), stream()
    rollout, stats = fill_rollout(collector_of(keeping), data.take, 3)
    assert rollout.groups.tolist() == [0] * G + [3] * G + [6] * G
    assert [seen.groups.unique().tolist() for seen in keeping.seen] == [[0, 1, 2], [3, 4], [5], [6]]
    assert data.position.cursor == 7 and float(stats["groups/filtered"].value()) == 4, (
        "kept and filtered are all that was taken"
    )


def test_refilling_ends_after_a_number_of_rounds_with_a_warning() -> None:
    keeping, data = Keeping(lambda rollout: rollout.groups == 2), stream()
    keeping.max_rounds = 4
    with pytest.warns(UserWarning, match="2 groups are missing after 4 rounds of refilling"):
        rollout, stats = fill_rollout(collector_of(keeping), data.take, 3)
    assert rollout.groups.tolist() == [2] * G and len(keeping.seen) == 4
    assert data.position.cursor == 3 + 2 * 3 and float(stats["groups/filtered"].value()) == data.position.cursor - 1


@pytest.mark.filterwarnings("ignore:no reward function applies")
def test_groups_that_are_solved_or_not_are_counted_before_they_are_filtered() -> None:
    scores: dict[int, tuple[float | None, float | None]] = {
        2: (1, 1),
        3: (0, 1),
        4: (0, -1),
        5: (None, 2),
        6: (None, None),
        7: (0.5, 0.5),
    }

    def by_prompt(prompts: Sequence[Any], completions: Any, **_: Any) -> list[float | None]:
        return [scores[prompt[0]][place % 2] for place, prompt in enumerate(prompts)]

    keeping = Keeping(lambda rollout: torch.zeros(len(rollout), dtype=torch.bool))
    keeping.max_rounds = 1
    collector = collector_of(keeping, rewards=[by_prompt], group_size=2)
    data = PromptDataModule([[first] for first in scores], 1, shuffle=False)
    data.connect(None, None)
    with pytest.warns(UserWarning, match="groups are missing"):
        _, stats = fill_rollout(collector, data.take, len(scores))
    counts = {name: float(stats[f"groups/{name}"].value()) for name in ("sampled", "solved", "unsolved")}
    assert counts == {"sampled": 6, "solved": 2, "unsolved": 1}


def test_a_split_group_is_refused() -> None:
    splitting = Keeping(lambda rollout: rollout.sample_ids != 4)
    with pytest.raises(
        ValueError, match="expected keep_groups to return equal values within a group, got both in group 1"
    ):
        fill_rollout(collector_of(splitting), stream().take, 2)


@pytest.mark.parametrize(
    ("number", "wanted", "hands"),
    [
        pytest.param(4, [4], [[0, 1, 2, 3]], id="one-rank"),
        pytest.param(6, [3, 3], [[0, 2, 4], [1, 3, 5]], id="alike"),
        pytest.param(4, [3, 1], [[0, 2, 3], [1]], id="one-wants-more"),
        pytest.param(4, [1, 0, 3], [[0], [], [1, 2, 3]], id="one-wants-none"),
        pytest.param(0, [0, 0], [[], []], id="none-wanted"),
    ],
)
def test_prompts_are_dealt_out_in_turn(number: int, wanted: list[int], hands: list[list[int]]) -> None:
    prompts = [Prompt(place, (2,), None, {}) for place in range(number)]
    assert [[prompt.index for prompt in hand] for hand in distribute_prompts(prompts, wanted)] == hands


def greedy_or_not(request: Request) -> list[int]:
    """A greedy answer has as many tokens as its prompt's first id says."""
    return answer(request) if request.sampling.temperature else [3] * (request.prefix_ids[0] - 1) + [1]


def lengths_of(prompts: Sequence[Any], completions: Sequence[str], *, completion_ids: Any, **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def baseline(*callbacks: RLCallback, script: Any = greedy_or_not, number: int = 2, **options: Any) -> Rollout:
    built = collector_of(*callbacks, script=script, greedy_baseline=True, **{"rewards": [lengths_of], **options})
    return fill_rollout(built, stream().take, number)[0]


def test_a_greedy_baseline_is_one_more_request_for_each_prompt_in_the_same_call() -> None:
    plain, collector = collector_of(), collector_of(greedy_baseline=True)
    calls, generate = [], collector.engine.generate

    def counting(requests: Sequence[Request], **options: Any) -> list[Completion]:
        calls.append(requests)
        return generate(requests, **options)

    collector.engine.generate = counting
    fill_rollout(collector, stream().take, 2, 3)
    fill_rollout(plain, stream().take, 2, 3)
    assert isinstance(plain.engine, FakeEngine) and len(calls) == 1
    sampled, greedy = calls[0][: 2 * G], calls[0][2 * G :]
    assert sampled == plain.engine.requests, "what trains is drawn as without a baseline"
    assert [(request.sampling.temperature, request.prefix_ids) for request in greedy] == [(0.0, (2,)), (0.0, (3, 3))]
    assert len({request.sample_id for request in calls[0]}) == len({r.seed for r in calls[0]}) == 2 * G + 2
    samplings = {replace(request.sampling, temperature=1.0) for request in calls[0]}
    assert samplings == {SamplingParams(max_new_tokens=9, eos_token_ids=[1], stop=("x",))}


def test_greedy_answers_are_no_rows_of_the_rollout_and_leave_the_others_alone() -> None:
    without, _ = fill_rollout(collector_of(script=greedy_or_not, rewards=[lengths_of]), stream().take, 2)
    found = baseline()
    assert "greedy_score" not in without.extras and found.extras["greedy_score"].tolist() == [2.0] * G + [3.0] * G
    state = {name: tensor for name, tensor in found.tensors() if name != "extras/greedy_score"}
    assert state.keys() == dict(without.tensors()).keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in without.tensors())


@pytest.mark.parametrize("action", ["zero_reward", "drop_tokens"])
def test_a_truncated_greedy_answer_takes_its_group_out_of_the_reward_under_the_mask(action: Any) -> None:
    def cut(request: Request) -> list[int]:
        return [4] * 9 if not request.sampling.temperature and request.prefix_ids == (2,) else greedy_or_not(request)

    assert baseline(script=cut).rewarded.all()
    masked = baseline(NoEOSMask(action), script=cut)
    assert masked.rewarded.tolist() == [False] * G + [True] * G and masked.trained.all()
    assert masked.extras["greedy_score"].tolist() == [0.0] * G + [3.0] * G


def test_a_greedy_answer_without_reward_takes_its_group_out_of_the_reward() -> None:
    def said(request: Request) -> Any:
        if request.sampling.temperature or request.prefix_ids != (2,):
            return greedy_or_not(request)
        return Completion(token_ids=(5,), logprobs=torch.zeros(1), finish=FinishReason.ABORT, version=6)

    def no_threes(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float | None]:
        return [None if ids[0] == 3 else 1.0 for ids in completion_ids]

    aborted = baseline(script=said)
    assert aborted.rewarded.tolist() == [False] * G + [True] * G and aborted.trained.all()
    assert aborted.extras["greedy_score"].tolist() == [0.0] * G + [3.0] * G
    with pytest.warns(UserWarning, match="no reward function applies"):
        assert not baseline(rewards=[no_threes]).rewarded.any()


def test_bonuses_enter_the_baseline() -> None:
    found = baseline(OverlongPenalty(5, 4), rewards=[parity_reward])  # greedy answers of 2 and 3 tokens
    assert found.extras["greedy_score"].tolist() == [0.0 - 0.25] * G + [1.0 - 0.5] * G


def test_baselines_stay_with_their_groups_through_filtering() -> None:
    found = baseline(Keeping(lambda rollout: rollout.groups % 3 == 0), number=3)
    assert found.groups.tolist() == [0] * G + [3] * G + [6] * G
    assert found.extras["greedy_score"].tolist() == [2.0] * G + [5.0] * G + [8.0] * G


def test_only_rollouts_draw_baselines() -> None:
    engine = FakeEngine(lambda _: [2, 1])
    tiny_module(engine=engine, advantages="remax").generate([[2, 3], [4]])
    assert [request.sample_id for request in engine.requests] == [0, 1]


def test_a_prompt_that_is_taken_twice_for_a_rollout_is_refused() -> None:
    prompts = [Prompt(index, (2,), "", {}) for index in (3, 4, 3)]
    with pytest.raises(RepeatedPromptError, match="from take of the data module, got index 3 twice"):
        distribute_prompts(prompts, [2, 1])
