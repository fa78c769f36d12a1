"""Conversations with an environment, repeated with the same answers: alone, or interleaved with others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_rl.data.pictures import has_open_place, pixels_of, place_pictures
from lightning_rl.environments import Environment
from lightning_rl.environments.environment import check_figures
from lightning_rl.environments.messages import REWRITTEN
from lightning_rl.environments.validation import check_reset, check_step, environment_of
from lightning_rl.policy.processor import Pixels
from lightning_rl.samples import Media
from lightning_rl.testing.properties.reward_repeats import same_value
from lightning_rl.utils.mutation_guard import copy_plain

REWRITES = -1  # precedes the token ids of a rewritten context
Calls = Sequence[tuple[Any, ...]]
Answer = Callable[[Any], Calls]
"""Function from an environment to the arguments of its calls of ``step``, several if each tool call is run alone."""


class Part(NamedTuple):
    """Result of a reset, of the steps of an answer, or of a final reward, in new containers.

    Attributes:
        words: Messages with places of pictures, or token ids; None for a final reward.
        reward: Reward, or None.
        done: True if the conversation ended.
        metrics: Metrics.
        calls: Arguments of the calls of ``step``.
        pictures: Pictures of the messages or token ids.
        rewrites: True if they are a rewritten context.
    """

    words: list[Any] | None
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, Any] = {}
    calls: Calls = ()
    pictures: Sequence[Pixels] = ()
    rewrites: bool = False


def play(
    factory: Callable[[], Any],
    row: Mapping[str, Any],
    seed: int,
    answers: Iterable[Answer],
    parts: list[Part],
    pictures: Sequence[Pixels] = (),
) -> Iterator[str]:
    """Run one conversation and append the result of each call to ``parts``; yield the name of each call before it.

    ``pictures`` are those of the row.
    """
    yield "reset"
    made: Any = environment_of(factory())
    opening = check_reset(made, made.reset(copy_plain(dict(row)), seed))
    words, shown = _take_pictures(made, opening, getattr(made, "opening_media", None), pictures)
    parts.append(Part(words, pictures=shown if words else pictures))
    for answer in answers:
        if parts[-1].done:
            break
        yield "step"
        parts.append(_reply(made, answer(made)))
    if not parts[-1].done and callable(reward := getattr(made, "reward", None)):
        yield "reward"
        parts.append(Part(None, reward()))
        check_figures(parts[-1].reward, {})
    yield "close"
    made.close()


def _reply(made: Any, calls: Calls) -> Part:
    """Return the reply of an environment to an answer."""
    steps: list[Any] = [check_step(made, made.step(*arguments)) for arguments in calls]
    last, rewards = steps[-1], [step.reward for step in steps if step.reward is not None]
    if isinstance(made, Environment):
        words = [message for step in steps for message in step.messages]
        words += [{**message, REWRITTEN: True} for step in steps for message in step.rewritten]
    else:
        words = [REWRITES, *last.rewritten] if last.rewritten else last.token_ids
    words, pictures = _take_pictures(made, words, getattr(last, "media", None))
    return Part(
        words=words,
        reward=sum(rewards) if rewards else None,
        done=bool(last.done),
        metrics=plain_copy({name: value for step in steps for name, value in step.metrics.items()}),
        calls=calls,
        pictures=pictures,
        rewrites=bool(last.rewritten),
    )


def _take_pictures(
    made: Any, words: Sequence[Any], media: Media | None, of_row: Sequence[Pixels] = ()
) -> tuple[list[Any], Sequence[Pixels]]:
    """Return messages with places of pictures, or token ids, and the pictures; places without one have the row's."""
    if not isinstance(made, Environment):
        return plain_copy(words), () if media is None else media.pictures
    placed, found = place_pictures(words, of_row if has_open_place(words) else (), "messages")
    name = "a picture of an environment"
    return plain_copy(placed), [value if isinstance(value, torch.Tensor) else pixels_of(value, name) for value in found]


def same_pictures(ours: Sequence[Pixels], theirs: Sequence[Pixels]) -> bool:
    """Return True if pictures have the same pixels in the same order."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def difference(
    ours: Sequence[Part], theirs: Sequence[Part], *, metrics: bool = False
) -> tuple[str, object, object] | None:
    """Return the kind of the first value that differs between two runs of a conversation, and both values."""
    for mine, yours in zip(ours, theirs, strict=False):
        if repr(mine.words) != repr(yours.words):
            return "words", mine.words, yours.words
        if not same_pictures(mine.pictures, yours.pictures):
            return "pictures", mine.pictures, yours.pictures
        if not same_value(mine.reward, yours.reward):
            return "rewards", mine.reward, yours.reward
        if mine.done != yours.done:
            return "ends", mine.done, yours.done
        if metrics and repr(mine.metrics) != repr(yours.metrics):
            return "metrics", mine.metrics, yours.metrics
    return None if len(ours) == len(theirs) else ("ends", f"{len(ours)} parts", f"{len(theirs)} parts")


def plain_copy(value: Any) -> Any:
    """Copy a value into new lists and dicts, with arrays and tensors as lists."""
    if isinstance(value, Mapping):
        return {key: plain_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_copy(item) for item in value]
    return value.tolist() if isinstance(value, (np.generic, np.ndarray, torch.Tensor)) else value
