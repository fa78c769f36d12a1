"""OpenEnvEnvironment: an environment of OpenEnv, in this process or behind its client.

Source: https://github.com/huggingface/OpenEnv.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from adapters.foreign import load
from lightning_rl.environments.adapters.gym import begin
from lightning_rl.environments.environment import Action, Environment, StepResult
from lightning_rl.environments.tools import result_of
from lightning_rl.processes.errors import CallError
from lightning_rl.samples import Message
from lightning_rl.utils.arguments import check_texts

UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, RecursionError)
"""Errors that ``parse`` may raise for a text without an action; errors of pydantic and JSON are ValueErrors."""


class Observed(NamedTuple):
    """Observation of an environment.

    Attributes:
        observation: for ``render``.
        reward: of the action; None for nothing to say.
        done: whether the episode has ended.
    """

    observation: Any
    reward: float | None
    done: bool


class OpenEnvEnvironment(Environment):
    """Plays an environment of OpenEnv, whose actions and observations are objects of pydantic.

    What ``render`` makes of the first observation takes the place of the row's prompt, of which the system messages
    stay. An answer that ``parse`` makes no action of does not reach the environment: the policy is told why, and may
    try again. An answer that was truncated is no action, and ends the conversation.

    Args:
        make: makes the environment, or a client of one; its methods may be coroutine functions.
        render: from an observation to what the policy reads.
        parse: from the text of an answer to an action; raises ValueError, such as pydantic's ValidationError, if there
            is none in it.
        columns: of the data that ``reset`` is given by their names, beside ``seed``.

    Raises:
        ImportError: if openenv is missing; the message says how to install it.
        ValueError: if an argument is none of this.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        render: Callable[[Any], str],
        parse: Callable[[str], Any],
        columns: Sequence[str] = (),
    ) -> None:
        for name, function in {"make": make, "render": render, "parse": parse}.items():
            if not callable(function):
                raise ValueError(f"expected {name} to be a function, got {function!r:.200}: write a lambda")
        check_texts(columns=columns)
        self._result_type = load("openenv.core.client_types", extra="openenv").StepResult
        self._remote, self._render, self._parse, self._columns = make(), render, parse, columns

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        if missing := [name for name in self._columns if name not in row]:
            raise ValueError(f"expected a column {missing[0]!r} in the data, named by columns=, got {sorted(row)}")
        observed = self._observe(self._remote.reset(seed=seed, **{name: row[name] for name in self._columns}))
        if observed.done:
            raise ValueError("expected an observation to answer from reset, got one that is done")
        return begin(row, self._text(observed.observation))

    @override
    def step(self, answer: Action) -> StepResult:
        if answer.truncated:
            return StepResult(done=True)
        try:
            action = self._parse(answer.text)
        except UNREADABLE as error:
            told = json.dumps({"error": _words(error)}, ensure_ascii=False)
            return StepResult(messages=[{"role": "user", "content": told}], metrics={"action_errors": 1.0})
        observed = self._observe(self._remote.step(action))
        if observed.done:
            return StepResult(done=True, reward=observed.reward)
        return StepResult(
            messages=[{"role": "user", "content": self._text(observed.observation)}], reward=observed.reward
        )

    @override
    def close(self) -> None:
        result_of(self._remote.close())

    def _observe(self, said: Any) -> Observed:
        """Of an environment, whose observation says all, or of a client, which puts it beside reward and end."""
        said = result_of(said)
        observation = said.observation if isinstance(said, self._result_type) else said
        reward = None if said.reward is None else float(said.reward)
        return Observed(observation, reward, bool(said.done))

    def _text(self, observation: Any) -> str:
        text = self._render(observation)
        if not isinstance(text, str) or not text:
            raise TypeError(
                f"expected render to make text of an observation, got {text!r:.200} of {observation!r:.200}"
            )
        return text


def _words(error: BaseException) -> str:
    """Return the error of an action; of a ValidationError each field with its fault, without links and inputs."""
    faults: Any = getattr(error, "errors", None)
    if not callable(faults):
        return str(CallError.of(error))
    found: Any = faults()
    return "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'action'}: {fault['msg']}" for fault in found)
