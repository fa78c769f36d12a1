"""Outcome: what an environment made of a conversation, beside the tokens, for rewards, metrics and checkpoints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.environments.environment import Message

DEFAULT = "environment"
"""What a single environment is called."""

REWARD_COLUMNS = ("conversation", "environment_reward")
"""What reward functions are given by these names: chat messages, and what the environment gave, None for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an environment made of a conversation.

    Args:
        answer: the token ids of the last turn.
        environment: the name of the environment; empty if there was none.
        messages: what was said, in words, if the environment speaks in them.
        reward: the sum of what the environment said of the turns; None if it said nothing.
        metrics: figures, those of the turns added up.
        seconds: that the environment took.
        failure: why the environment could not go on, if it could not; at its second try, if it had two.
        log: the traceback of the failure, and what the environment printed if it ran in a process of its own.
    """

    answer: tuple[int, ...]
    environment: str = ""
    messages: tuple[Message, ...] = ()
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str | None = None
    log: str = ""

    def state(self) -> dict[str, Any]:
        """Plain values that load under ``weights_only=True``; messages as JSON."""
        return {
            "answer": list(self.answer),
            "environment": self.environment,
            "messages": json.dumps([dict(message) for message in self.messages], default=str),
            "reward": self.reward,
            "metrics": dict(self.metrics),
            "seconds": self.seconds,
            "failure": self.failure,
            "log": self.log,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "Outcome":
        """The inverse of :meth:`state`."""
        return Outcome(**{**state, "answer": tuple(state["answer"]), "messages": tuple(json.loads(state["messages"]))})


def reward_columns(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """What rewards are given beside the columns of the data: the conversation and what its environment gave."""
    if not outcomes:
        return {}
    messages = [[dict(message) for message in outcome.messages] for outcome in outcomes]
    return dict(zip(REWARD_COLUMNS, (messages, [outcome.reward for outcome in outcomes]), strict=True))


def metrics_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """The figures of conversations under the names that they are logged by, a value for each conversation.

    A figure that an environment gives only sometimes is 0 in its other conversations. With several environments, each
    has names of its own: ``env/<environment>/<figure>``.
    """
    names = {outcome.environment for outcome in outcomes} - {""}
    found: dict[str, list[float]] = {}
    for name in sorted(names):
        mine = [outcome for outcome in outcomes if outcome.environment == name]
        head = "env" if names == {DEFAULT} else f"env/{name}"
        for figure in sorted({figure for outcome in mine for figure in outcome.metrics}):
            found[f"{head}/{figure}"] = [float(outcome.metrics.get(figure, 0.0)) for outcome in mine]
        rewards = [outcome.reward for outcome in mine if outcome.reward is not None]
        found |= {f"{head}/reward": rewards} if rewards else {}
    return {**found, "time/environment": [outcome.seconds for outcome in outcomes]}
