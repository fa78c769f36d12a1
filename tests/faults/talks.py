"""Faulty replacements of functions of the library between two turns."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_rl import FinishReason, Rollout
from lightning_rl.environments import Conversation, TokenStep
from lightning_rl.generation import Completion
from lightning_rl.rollout import TOKEN, TURN_REWARDS, segments_of, turn_numbers
from lightning_rl.samples import Segment, Trajectory
from lightning_rl.signal.discounted_returns import gae


def around(target: Any, name: str, change: Callable[..., Any]) -> Any:
    """Patch a function by one that gets the original: ``change(original, *arguments)``."""
    original = getattr(target, name)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        return change(original, *arguments, **keywords)

    return patch.object(target, name, wrapped)


# Rows.


def holes_of(rollout: Rollout) -> Tensor:
    """Return the environment tokens of responses, [B, T]."""
    return (torch.arange(rollout.width) < rollout.response_lengths[:, None]) & ~rollout.action_mask


def drawing(rollout: Rollout, mask: Tensor) -> Rollout:
    """Return the rows with another mask of sampled tokens and versions that match it."""
    newest = rollout.policy_version.amax(-1, keepdim=True)
    return rollout.replace(
        action_mask=mask,
        valid_tokens=mask,
        policy_version=torch.where(mask, rollout.policy_version.maximum(newest), -1),
    )


def behind_answers(rollout: Rollout) -> Tensor:
    """Return the first environment token after each answer, [B, T]."""
    before = torch.nn.functional.pad(rollout.action_mask, (1, 0))[:, :-1]
    return holes_of(rollout) & before


def training_closing(rollout: Rollout) -> Rollout:
    return drawing(rollout, rollout.action_mask | behind_answers(rollout))


def training_all(rollout: Rollout) -> Rollout:
    return drawing(rollout, rollout.action_mask | holes_of(rollout))


def shifted_mask(rollout: Rollout) -> Rollout:
    inside = torch.arange(rollout.width) < rollout.response_lengths[:, None]
    return drawing(rollout, torch.nn.functional.pad(rollout.action_mask, (1, 0))[:, :-1] & inside)


def without_last_turn(rollout: Rollout) -> Rollout:
    turns = turn_numbers(rollout)
    last = turns.amax(-1, keepdim=True)
    return drawing(rollout, rollout.action_mask & ((turns < last) | (last == 1)))


def padded_inside(rollout: Rollout) -> Rollout:
    holes, wide = holes_of(rollout), rollout.fit_width(rollout.width + 1)
    first = torch.where(holes.any(-1), holes.long().argmax(-1), rollout.width)[:, None]
    place = torch.arange(wide.width)[None]
    source = torch.where(place < first, place, torch.where(place == first, rollout.width, place - 1))

    def move(tensor: Tensor, axis: object, pad: float) -> Tensor:
        return tensor.gather(1, source) if axis == TOKEN else tensor

    moved = wide.map(move)
    return moved.replace(response_lengths=rollout.response_lengths + holes.any(-1))


def versions_everywhere(rollout: Rollout) -> Rollout:
    newest = rollout.policy_version.amax(-1, keepdim=True)
    return rollout.replace(policy_version=torch.where(holes_of(rollout), newest, rollout.policy_version))


def one_turn_each(rollout: Rollout) -> Rollout:
    joined = turn_numbers(rollout).clamp(max=1)
    return rollout.replace(segments=segments_of(joined, rollout.response_lengths))


def training_failed(rollout: Rollout) -> Rollout:
    return rollout.replace(trained=rollout.real, rewarded=rollout.real)


def counting_failed(result: Any, *_: Any) -> Any:
    rollout, *others = result
    failed = rollout.finish == FinishReason.FAILED
    return (rollout.replace(rewarded=rollout.rewarded | failed), *others)


def shifted_logprobs(rollout: Rollout) -> Rollout:
    assert rollout.rollout_logprobs is not None
    together = torch.zeros_like(rollout.rollout_logprobs)
    for row, drawn in enumerate(rollout.action_mask):
        together[row, : int(drawn.sum())] = rollout.rollout_logprobs[row, drawn]
    return rollout.replace(rollout_logprobs=together)


def rewards_behind_turns(rollout: Rollout) -> Rollout:
    def last_of_reply(row: int, drawn: Tensor) -> int:
        turns = turn_numbers(rollout)[row]
        following = (turns > turns[drawn[-1]]).nonzero()[:, 0]
        return int(following[0] if len(following) else rollout.response_lengths[row]) - 1

    return moved_rewards(rollout, last_of_reply)


def moved_rewards(rollout: Rollout, place: Callable[[int, Tensor], int]) -> Rollout:
    """Return the rewards of turns at other places, from the row and the places of the turn's tokens."""
    turns, rewards = turn_numbers(rollout), rollout.token_extras[TURN_REWARDS]
    moved = torch.zeros_like(rewards)
    for row, numbers in enumerate(turns):
        for number in range(1, int(numbers.max()) + 1):
            drawn = (numbers == number).nonzero()[:, 0]
            if len(drawn):
                moved[row, place(row, drawn)] += rewards[row, drawn].sum()
    return rollout.replace(token_extras={**rollout.token_extras, TURN_REWARDS: moved})


def last_turn_lost(original: Any, samples: Sequence[Trajectory], *engine: Any, **options: Any) -> Rollout:
    def cut(one: Trajectory) -> Trajectory:
        answers = [place for place, segment in enumerate(one.segments) if segment.sampled]
        return dataclasses.replace(one, segments=one.segments[: answers[-2] + 1]) if len(answers) > 2 else one

    return original(list(map(cut, samples)), *engine, **options)


# Conversations.


def retokenised(tokenizer: Any, ids: Sequence[int], close: Sequence[int]) -> tuple[int, ...]:
    """Decode, trim and encode an answer; its end stays."""
    end = tuple(ids[-1:]) if ids and ids[-1] in close else ()
    text = tokenizer.decode(list(ids), skip_special_tokens=True).strip()
    return (*tokenizer(text, add_special_tokens=False)["input_ids"], *end)


def encoded_again(original: Any, self: Any, completion: Completion) -> None:
    bridge = self._partner._bridge  # noqa: SLF001
    ids = retokenised(bridge.tokenizer, completion.token_ids, self.request.eos_token_ids)
    logprobs = completion.logprobs
    if logprobs is not None:
        logprobs = torch.nn.functional.pad(logprobs[: len(ids)], (0, max(len(ids) - len(logprobs), 0)))
    original(
        self, dataclasses.replace(completion, token_ids=ids, logprobs=logprobs, versions=None) if ids else completion
    )


def rendered_prefix(original: Any, self: Any, prefix: tuple[int, ...], media: Any) -> None:
    bridge, close = self._partner._bridge, self._wanted.request.eos_token_ids  # noqa: SLF001
    original(self, prefix_with(self, lambda ids, _: retokenised(bridge.tokenizer, ids, close)) or prefix, media)


def prefix_without_ends(original: Any, self: Conversation, prefix: tuple[int, ...], media: Any) -> None:
    original(self, prefix_with(self, lambda ids, _: ids[:-1]) or prefix, media)


def prefix_with(self: Conversation, change: Callable[[tuple[int, ...], bool], tuple[int, ...]]) -> tuple[int, ...]:
    """Return the prefix of the next turn with changed answers."""
    segments = self._made.segments
    parts = [
        change(segment.token_ids, number == len(segments) - 1) if segment.sampled else segment.token_ids
        for number, segment in enumerate(segments)
    ]
    return (*self._made.request.prefix_ids, *(token for part in parts for token in part), *self._read)


def without_ends(original: Any, self: Conversation, completion: Completion) -> None:
    ids, logprobs = completion.token_ids, completion.logprobs
    if len(ids) > 1 and ids[-1] in self._wanted.request.eos_token_ids and logprobs is not None:
        completion = dataclasses.replace(completion, token_ids=ids[:-1], logprobs=logprobs[:-1])
    original(self, completion)


def exchanged(original: Any, self: Conversation, *answered: Any) -> None:
    *answer, step = answered
    told, HEARD[:] = list(HEARD), [step.token_ids]
    if self._wanted.request.sample_id % 2 and told and told[0] and not step.done:
        step = dataclasses.replace(step, token_ids=told[0])
    original(self, *answer, step)


HEARD: list[Any] = []


def keeping_reply(original: Any, self: Any, *answered: Any) -> None:
    self.said = tuple(answered[-1].token_ids)
    original(self, *answered)


def appended_cut(original: Any, self: Any, finish: FinishReason) -> None:
    segments = self._made.segments
    if finish == FinishReason.LENGTH and segments:
        cut = Segment(token_ids=self.said[:3], parent=len(segments) - 1)
        self._made = dataclasses.replace(self._made, segments=(*segments, cut))
    original(self, finish)


def stepping_twice(original: Any, self: Conversation, completion: Completion) -> None:
    if self._wanted.request.sample_id % 4 == 0 and not self._turns:
        self._partner.step(completion.token_ids, completion.finish)
    original(self, completion)


def last_reward_alone(original: Any, self: Conversation, *arguments: Any) -> None:
    self._rewards = self._rewards[-1:]
    original(self, *arguments)


def failed_as_zero(original: Any, self: Conversation, finish: FinishReason, failure: Any = None) -> None:
    if finish == FinishReason.FAILED and self._turns:
        self._rewards = [0.0]
        finish, failure = FinishReason.STOP, None
    original(self, finish, failure)


def other_seeds(original: Any, self: Conversation, error: BaseException) -> None:
    if not self._retries:
        request = self._wanted.request
        self._wanted = dataclasses.replace(self._wanted, request=dataclasses.replace(request, seed=request.seed ^ 1))
    original(self, error)


def keeping_rewards(original: Any, self: Any) -> None:
    earned = list(getattr(self, "_rewards", ()))
    original(self)
    self._rewards = earned


def turns_as_stop(original: Any, self: Conversation, finish: FinishReason) -> None:
    original(self, FinishReason.STOP if finish == FinishReason.TURNS else finish)


def a_turn_more(original: Any, self: Conversation, *given: Any, **options: Any) -> None:
    environment, wanted, limits, *rest = given
    original(self, environment, wanted, dataclasses.replace(limits, turns=limits.turns + 1), *rest, **options)


def room_of_all_words(original: Any, self: Conversation, prefix: Sequence[int]) -> int:
    said = len(prefix) - len(self._made.request.prefix_ids) - self._drawn
    return min(original(self, prefix), self._wanted.request.sampling.max_new_tokens - self._drawn - said)


def room_for_whole_budget(original: Any, self: Conversation, prefix: Sequence[int]) -> int:
    drawn, self._drawn = self._drawn, 0
    try:
        return original(self, prefix)
    finally:
        self._drawn = drawn


def two_answers_exchanged(original: Any, asked: Sequence[Any], completions: Sequence[Completion]) -> None:
    given = [dataclasses.replace(one, sample_id=None) for one in completions]
    limits = [each.request.sampling.max_new_tokens for each in asked]
    if len(given) > 1 and asked[-1].request.turn and limits[-1] == limits[-2]:
        given[-2:] = given[:-3:-1]
    original(asked, given)


def row_of_the_sample_before(conversation: Conversation, *_: Any) -> Conversation:
    before, ROW[:] = list(ROW), [conversation._row]  # noqa: SLF001
    if before:
        conversation._row = before[0]  # noqa: SLF001
    return conversation


ROW: list[Any] = []


def seeded_by_sample(conversation: Conversation, *_: Any) -> Conversation:
    conversation._seed = conversation._wanted.request.seed  # noqa: SLF001
    return conversation


def cut_as_whole(original: Any, self: Any, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
    return original(self, token_ids, FinishReason.STOP if finish == FinishReason.LENGTH else finish)


def first_result_alone(original: Any, self: Any, answer: Any) -> Any:
    step = original(self, answer)
    return dataclasses.replace(step, messages=step.messages[:1])


def results_exchanged(original: Any, self: Any, answer: Any) -> Any:
    step = original(self, answer)
    return dataclasses.replace(step, messages=step.messages[::-1])


# Bridges.


def without_newline(original: Any, self: Any, drawn: Sequence[int], messages: Any) -> tuple[int, ...]:
    ids = original(self, drawn, messages)
    return ids[1:] if drawn and drawn[-1] in self.close else ids


def never_closing(original: Any, self: Any, drawn: Sequence[int], messages: Any) -> tuple[int, ...]:
    ids = original(self, drawn, messages)
    return ids if drawn and drawn[-1] in self.close else ids[1:]


def always_closing(original: Any, self: Any, drawn: Sequence[int], messages: Any) -> tuple[int, ...]:
    return original(self, (), messages)


def one_by_one(original: Any, self: Any, drawn: Sequence[int], messages: Any) -> tuple[int, ...]:
    first = original(self, drawn, messages[:1])
    later = [original(self, (), [message]) for message in messages[1:]]
    return (*first, *(token for ids in later for token in ids))


def two_words_each(original: Any, self: Any, drawn: Sequence[int], messages: Any) -> tuple[int, ...]:
    short = [{**message, "content": " ".join(message["content"].split()[:2])} for message in messages]
    return original(self, drawn, short)


def never_sanitized(self: Any, messages: Any, **options: Any) -> list[int]:
    text = str(self._render(messages, tokenize=False, **options))
    return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


# Rewards, advantages, figures.


def whole_row(self: Trajectory) -> tuple[int, ...]:
    return tuple(token for segment in self.segments for token in segment.token_ids)


def rewards_of_the_row_above(columns: Any, *_: Any) -> Any:
    given = columns.get("environment_reward")
    return columns if given is None else {**columns, "environment_reward": [given[-1], *given[:-1]]}


def without_last_message(columns: Any, *_: Any) -> Any:
    return {**columns, "conversation": [talk[:-1] for talk in columns.get("conversation", ())]} if columns else columns


def over_holes(rewards: Tensor, values: Tensor, valid: Tensor, **options: Any) -> Tensor:
    behind = valid.flip(-1).long().cumsum(-1).flip(-1) > 0
    inside = behind & (valid.long().cumsum(-1) > 0)
    return torch.where(valid, gae(rewards, values, inside, **options), 0.0)


def figures(change: Callable[[dict[str, list[float]]], dict[str, list[float]]]) -> Callable[..., Any]:
    """Change the logged metrics of conversations."""
    return lambda found, *_: {**found, **change(found)}
