"""Environments for tests, in the vocabulary of the tiny policy: quick, and without a random number."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from kit.support import EOS, tiny_module
from lightning_rl import FinishReason, RLLightningModule, Rollout
from lightning_rl.environments import EnvironmentReward, TokenEnvironment, TokenStep
from lightning_rl.generation import Request
from lightning_rl.samples import Prompt, Trajectory


def wanted(request: Request, **columns: Any) -> Trajectory:
    """A sample that has not begun, of a row with some columns."""
    return Trajectory(prompt=Prompt(request.sample_id, request.prefix_ids, "?", columns), request=request)


def response_of(trajectory: Trajectory) -> tuple[int, ...]:
    """The token ids after the prompt."""
    return tuple(token for segment in trajectory.segments for token in segment.token_ids)


def turn_numbers_of(trajectory: Trajectory) -> tuple[int, ...]:
    """The turn of each token after the prompt, from 1; 0 for replies, minus the turn before for a new context."""
    numbers, turn = list[int](), 0
    for segment in trajectory.segments:
        turn += segment.sampled
        number = turn if segment.sampled else 0 if segment.parent is not None else -turn
        numbers += [number] * len(segment.token_ids)
    return tuple(numbers)


class Talk(TokenEnvironment):
    """Begins with the prompt of its row, and holds nothing."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        return ()

    @override
    def close(self) -> None: ...


class Echo(Talk):
    """Repeats the first token of an answer and its place in the conversation, until an answer begins with an even one.

    Args:
        breaks_at: the seed of the prompt's index modulo 4 at which it raises in the second turn; None for never.
    """

    def __init__(self, breaks_at: int | None = None) -> None:
        self.breaks_at, self.turn, self.index = breaks_at, 0, 0

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        self.index = int(row.get("place", 0))
        return ()

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        self.turn += 1
        if self.turn == 2 and self.breaks_at is not None and self.index % 4 == self.breaks_at:
            raise OSError("the connection is gone")
        first, reward = token_ids[0], float(sum(token_ids) % 5) / 4
        done = first % 2 == 0 and finish == FinishReason.STOP
        if done:
            return TokenStep(done=True, reward=reward)
        return TokenStep(token_ids=(first, 2 + self.turn), reward=reward, metrics={"echoes": 1.0})


def new_echo() -> Echo:
    """An :class:`Echo`, for configuration files."""
    return Echo()


class Rewriting(Echo):
    """Return the same messages as a rewritten context, which the policy reads again."""

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        self.context = list(row["prompt"])
        return super().reset(row, seed)

    @override
    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        said = super().step(token_ids, finish)
        if said.done:
            return said
        self.context += [*token_ids, *said.token_ids]
        return self.rewrite(said)

    def rewrite(self, said: TokenStep) -> TokenStep:
        """The same with what the policy reads instead."""
        return replace(said, token_ids=(), rewritten=self.context)


class Forgetful(Rewriting):
    """After every second turn it has the policy read the first token and the last three alone."""

    @override
    def rewrite(self, said: TokenStep) -> TokenStep:
        if self.turn % 2:
            return said
        self.context = [self.context[0], *self.context[-3:]]
        return super().rewrite(said)


TURN_ENDS = (EOS, 5, 6, 7, 8)
CONVERSATIONS: dict[str, Any] = {
    "environment": Echo,
    "rewards": EnvironmentReward(),
    "max_turns": 4,
    "max_turn_tokens": 3,
}


def talking_module(**options: Any) -> RLLightningModule:
    """A tiny module whose samples talk to :class:`Echo`; every option can be replaced."""
    if (breaks_at := options.pop("breaks_at", None)) is not None:
        options["environment"] = partial(Echo, breaks_at)
    return tiny_module(**{**CONVERSATIONS, "max_new_tokens": 9, "eos_token_ids": TURN_ENDS, **options})


def leak_mask(rollout: Rollout) -> Rollout:
    """As if the policy had drawn what the environment said."""
    inside = torch.arange(rollout.width) < rollout.response_lengths[:, None]
    newest = rollout.policy_version.amax(-1, keepdim=True)
    versions = torch.where(rollout.action_mask, rollout.policy_version, newest).where(inside, -1)
    return rollout.replace(action_mask=inside, valid_tokens=inside & rollout.trained[:, None], policy_version=versions)
