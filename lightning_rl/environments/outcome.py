"""Results of a conversation besides its tokens, for rewards, metrics and checkpoints."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_rl.environments.environment import Message

DEFAULT = "environment"
"""Name of a single environment."""

REWARD_COLUMNS = ("conversation", "environment_reward")
"""Columns that reward functions receive: chat messages, and the environment's reward or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of a conversation.

    Args:
        answer: Token ids of the last turn.
        environment: Name of the environment; empty without one.
        messages: Messages of the conversation, if the environment uses them.
        reward: Sum of the environment's rewards, or None.
        metrics: Metrics, summed over turns.
        seconds: Seconds spent in the environment.
        failure: Description of the failure, of the second try if there was one; None without one.
        log: Traceback of the failure, and the output of an environment in a worker process.
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
        """Return plain values that load under ``weights_only=True``; messages as JSON."""
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
        """Invert :meth:`state`."""
        return Outcome(**{**state, "answer": tuple(state["answer"]), "messages": tuple(json.loads(state["messages"]))})


def reward_columns(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Return the columns that rewards receive besides those of the data."""
    if not outcomes:
        return {}
    messages = [[dict(message) for message in outcome.messages] for outcome in outcomes]
    return dict(zip(REWARD_COLUMNS, (messages, [outcome.reward for outcome in outcomes]), strict=True))


def metrics_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the metrics of conversations by logged name, one value per conversation.

    A metric that is missing in a conversation counts as 0. With several environments the names are
    ``env/<environment>/<metric>``.
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
