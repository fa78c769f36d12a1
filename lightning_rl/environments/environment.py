"""Environment in messages, and the protocol in token ids on which conversations run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lightning_rl.samples import FinishReason, Media, Message
from lightning_rl.utils.arguments import check_numbers
from lightning_rl.utils.naming import CheckedNames

LIMITS_REACHED, FAILURES = {"cut_by_turns", "cut_by_tokens"}, {"failed", "retries", "timeouts"}
RESERVED = {"turns", "tokens", "rewritten", "reward", "logprob"} | LIMITS_REACHED | FAILURES
"""Names of the metrics of every conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """Tool call of the policy.

    Args:
        name: Name of the tool.
        arguments: Arguments by name, as written by the policy, not validated yet.
        id: Id of the call, if the format has ids.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Answer of the policy in one turn: text "", one tool call ``add(2, 3)``, finish STOP, turn 0.

    Args:
        text: Text without tool calls and reasoning.
        tool_calls: Tool calls in order; empty for an answer that was truncated.
        reasoning: Reasoning, if the format separates it.
        errors: Messages about unparsable tool calls, for the policy.
        finish: Reason for the end; ``LENGTH`` if it was truncated.
        turn: Number of the turn, from 0.
        token_ids: Sampled ids, with EOS.
    """

    text: str
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    errors: Sequence[str] = ()
    finish: FinishReason = FinishReason.STOP
    turn: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def truncated(self) -> bool:
        """True if the turn reached its limit of tokens."""
        return self.finish == FinishReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Reply of an environment to an answer: messages [{"role": "tool", "content": "5"}], reward None, done False.

    Args:
        messages: Messages of users or tools for the policy; empty only if ``done`` or ``rewritten``.
        rewritten: Whole new context instead of ``messages``, such as a summary or a shortened history.
        reward: Reward of this turn, or None. The sum over turns is the reward of the sample.
        done: True to end the conversation.
        metrics: Metrics to log, summed over the turns of a conversation.

    Raises:
        ValueError: If the conversation would continue without a message.
    """

    messages: Sequence[Message] = ()
    rewritten: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the combination of fields."""
        _check_step("messages", self.messages, self.rewritten, done=self.done)
        check_figures(self.reward, self.metrics)


class Environment(CheckedNames):
    """Environment of one conversation, created for each sample, so it needs no locks.

    Attributes:
        tools: Functions whose schemas are in the first prompt; the environment calls them itself.
        replayable: True if row, seed and answers determine its replies, so that the audit may repeat conversations.
    """

    tools: Sequence[Callable[..., Any]] = ()
    replayable: bool = True

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Begin a conversation.

        Args:
            row: Columns of the data set's row, with the prompt.
            seed: Seed, equal for all samples of a group.

        Returns:
            The first messages; empty to begin with the row's prompt.
        """
        del row, seed
        return ()

    def step(self, answer: Action) -> StepResult:
        """Return the reply to an answer."""
        raise NotImplementedError(f"{type(self).__name__} has to define step(self, answer) -> StepResult")

    def reward(self) -> float | None:
        """Return the final reward of a conversation that ends at a limit, added to its last turn, or None.

        Called at most once, before :meth:`close`, if the environment did not end the conversation.
        """
        return None

    def close(self) -> None:
        """End the conversation; called once in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStep:
    """:class:`StepResult` in token ids: token_ids (8, 9), reward 0.5, done False.

    Args:
        token_ids: Ids between the answer and the next one; empty only if ``done`` or ``rewritten``.
        rewritten: Whole prefix of the next answer instead of ``token_ids``.
        reward: Reward of this turn, or None.
        done: True to end the conversation.
        metrics: Metrics to log.
        messages: Messages of the turn, with the answer, for rewards and records.
        media: Pictures among ``token_ids`` or ``rewritten``; None without.
    """

    token_ids: Sequence[int] = ()
    rewritten: Sequence[int] = ()
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    media: Media | None = None

    def __post_init__(self) -> None:
        """Check the combination of fields."""
        _check_step("token_ids", self.token_ids, self.rewritten, done=self.done)
        check_figures(self.reward, self.metrics)


@runtime_checkable
class TokenEnvironment(Protocol):
    """Environment of one conversation in token ids: for tests and as the base of others.

    It may have a ``reward()`` like :meth:`Environment.reward`, which may also return a :class:`TokenStep` with
    ``done=True`` to add metrics and messages.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Begin a conversation; return its prompt, or nothing to begin with the row's prompt."""
        ...

    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Return the reply to the sampled ids of a turn."""
        ...

    def close(self) -> None:
        """End the conversation."""
        ...


def _check_step(name: str, replies: Sequence[Any], rewritten: Sequence[Any], *, done: bool) -> None:
    for field_name, items in ((name, replies), ("rewritten", rewritten)):
        if isinstance(items, (str, Mapping)):
            raise ValueError(f"expected {field_name} to be a list, got {type(items).__name__} {items!r}")
    if rewritten and (done or replies):
        raise ValueError(
            f"expected rewritten without {name} and done=True, got more: put the whole context into rewritten, and "
            "leave it out at the end of a conversation"
        )
    if not (done or replies or rewritten):
        raise ValueError(f"expected {name} for the policy to answer, or done=True, got neither")


def check_figures(reward: Any, metrics: Any, turn_rewards: Any = MappingProxyType({})) -> None:
    """Check that rewards and metrics are finite numbers, or None for no reward.

    Raises:
        ValueError: If not; names the value.
    """
    for kind, value in (("metrics to map names", metrics), ("turn_rewards to map ids of responses", turn_rewards)):
        if not (isinstance(value, Mapping) and all(isinstance(name, str) and name for name in value)):
            raise ValueError(f"expected {kind} to numbers, got {value!r:.200}")
    if taken := RESERVED & set(metrics):
        raise ValueError(f"expected another name than {min(taken)!r} for a metric, which every conversation logs")
    figures = {"reward": reward, **{f"metric {name}": value for name, value in metrics.items()}}
    figures |= {f"reward of {name}": value for name, value in turn_rewards.items()}
    for name, value in figures.items():
        if not isinstance(value, (bool, np.bool_)):
            check_numbers(finite=True, optional=name == "reward", **{name: value})
