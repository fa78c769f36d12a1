"""Environment: what a policy talks to, in messages, and the lower protocol in token ids that conversations run on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lightning_rl.arguments import check_numbers
from lightning_rl.rollout import Finish

COUNTED = frozenset(
    {
        "turns",
        "tokens",
        "rewritten",
        "failed",
        "retries",
        "timeouts",
        "cut_by_turns",
        "cut_by_tokens",
        "reward",
        "logprob",
    }
)
"""Figures of every conversation, whose names no environment can give to its own."""

LARGEST = float(np.finfo(np.float32).max)
TRUTHS = (bool, np.bool_)

Message = Mapping[str, Any]
"""A chat message as templates take it: ``role``, ``content``, perhaps ``tool_calls``, ``name``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy asked for.

    Args:
        name: of the tool.
        arguments: by name, as the policy wrote them: nobody has checked them against the tool yet.
        id: what the policy called it, if its format has ids.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the policy said in one turn.

    Args:
        text: what it says to its partner, without tool calls and without reasoning.
        tool_calls: in their order; none of a turn that was cut off, since half a call is no call.
        reasoning: what it thought before, if its format tells that apart.
        errors: attempts at a call that no parser understands, in words for the policy.
        finish: why the turn ended; ``LENGTH`` if it was cut off.
        turn: its number, from 0.
        token_ids: what was drawn, EOS included.
    """

    text: str
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str | None = None
    errors: Sequence[str] = ()
    finish: Finish = Finish.STOP
    turn: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def cut_off(self) -> bool:
        """Whether the turn ran into its limit of tokens."""
        return self.finish == Finish.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment says to an answer.

    Args:
        messages: of users or tools, which the policy answers next; none only if the conversation is done, or rewritten.
        rewritten: instead of ``messages``, all that the policy reads from here on, in the place of everything that was
            said: a summary, or a history that has become shorter.
        reward: of this turn; None for nothing to say. The sum over turns is the reward of the sample.
        done: whether the conversation ends here.
        metrics: figures to log; those of a conversation's turns are added up.

    Raises:
        ValueError: if a conversation goes on without anything said.
    """

    messages: Sequence[Message] = ()
    rewritten: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks that it is clear how the conversation goes on."""
        _check_step("messages", self.messages, self.rewritten, done=self.done)
        check_figures(self.reward, self.metrics)


class Environment:
    """A partner for one conversation, made anew for each sample, so that it needs no locks.

    Attributes:
        tools: functions whose schemas go into the first prompt; the environment calls them itself.
        replayable: whether row, seed and answers say all that it says, so that the audit may hold its conversations
            again.
    """

    tools: Sequence[Callable[..., Any]] = ()
    replayable: bool = True

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Begins a conversation.

        Args:
            row: the columns of the data set's row, the prompt among them.
            seed: for whatever is random in it: equal for all samples of a group, so that they answer one question.

        Returns:
            The messages that the conversation begins with; none to begin with the row's own prompt.
        """
        del row, seed
        return ()

    def step(self, answer: Answer) -> Step:
        """Takes an answer and says what comes back."""
        raise NotImplementedError(f"{type(self).__name__} has to say what comes back: def step(self, answer) -> Step")

    def reward(self) -> float | None:
        """What a conversation is worth that a limit ends: its last turn earns it too. None for nothing to say.

        Asked at most once, before :meth:`close`, and only of an environment that would have gone on.
        """
        return None

    def close(self) -> None:
        """Ends the conversation; called once, whatever happened before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStep:
    """The same as :class:`Step` in token ids.

    Args:
        token_ids: what comes after the answer, up to where the next one begins; none only if done, or rewritten.
        rewritten: instead of ``token_ids``, the whole prefix of the next answer.
        reward: of this turn.
        done: whether the conversation ends here.
        metrics: figures to log.
        messages: the turn in words, answer included, for rewards and records.
    """

    token_ids: Sequence[int] = ()
    rewritten: Sequence[int] = ()
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Message] = ()

    def __post_init__(self) -> None:
        """Checks that it is clear how the conversation goes on."""
        _check_step("token_ids", self.token_ids, self.rewritten, done=self.done)
        check_figures(self.reward, self.metrics)


@runtime_checkable
class TokenEnvironment(Protocol):
    """A partner for one conversation that speaks in token ids: for tests, toys, and to build others on.

    It may have a ``reward()`` too, as :meth:`Environment.reward`, which may return a :class:`TokenStep` that is done,
    for figures and messages beside the reward.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Begins a conversation; its prompt, or nothing to begin with the row's own."""
        ...

    def step(self, token_ids: Sequence[int], finish: Finish) -> TokenStep:
        """Takes what was drawn in a turn, and why it ended."""
        ...

    def close(self) -> None:
        """Ends the conversation."""
        ...


def _check_step(name: str, said: Sequence[Any], rewritten: Sequence[Any], *, done: bool) -> None:
    for what, items in ((name, said), ("rewritten", rewritten)):
        if isinstance(items, (str, Mapping)):
            raise ValueError(f"expected {what} to be a list, got {type(items).__name__} {items!r}")
    if not isinstance(done, TRUTHS):
        raise ValueError(f"expected done to be True or False, got {done!r:.200}")
    if rewritten and done:
        raise ValueError(
            "expected rewritten or done=True, got both: nobody reads on in a conversation that is done, so leave "
            "rewritten out"
        )
    if rewritten and said:
        raise ValueError(f"expected rewritten alone, got {name} too: put all that the policy is to read into rewritten")
    if not done and not said and not rewritten:
        raise ValueError(f"expected {name} for the policy to answer, or done=True, got neither")


def check_figures(reward: Any, metrics: Any) -> None:
    """Refuses what is no number, above all NaN: no reward is None, and never 0.

    Raises:
        ValueError: naming what is no number.
    """
    if not isinstance(reward, TRUTHS):
        check_numbers(finite=True, optional=True, reward=reward)
    if not isinstance(metrics, Mapping):
        raise ValueError(f"expected metrics to map names to numbers, got {metrics!r:.200}")
    if reward is not None and abs(float(reward)) > LARGEST:
        raise ValueError(f"expected a reward of at most {LARGEST:g}, which float32 holds, got {reward!r}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ValueError(f"expected names of metrics to be text, got {name!r:.200}")
        if name in COUNTED:
            raise ValueError(f"expected another name than {name!r} for a metric, which conversations count themselves")
        if not isinstance(value, TRUTHS):
            check_numbers(finite=True, **{f"metric {name}": value})
