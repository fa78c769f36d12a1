"""Environment of a program with its own loop, such as an agent's harness.

A conversation asks its environment for the reply to an answer; a program requests an answer whenever it needs one. So a
reset starts the program and waits for its first question, whose prefix is the prompt; a step answers it and waits for
the next, whose prefix has to continue the previous one and the sampled tokens. The conversation ends with the program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_rl.environments.adapters.completion_server import Line, Question
from lightning_rl.environments.environment import RESERVED, TokenStep
from lightning_rl.rollout import FinishReason
from lightning_rl.samples import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Reward of a program's conversation, or None, and metrics to log."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Program(Protocol):
    """Program that requests answers over a line."""

    def start(self, row: Mapping[str, Any], seed: int) -> Line:
        """Start it elsewhere, and return its line at once."""
        ...

    def result(self, session: str) -> ProgramResult:
        """Return the result of the session after its end."""
        ...

    def messages(self, session: str) -> Sequence[Message]:
        """Return the messages since the last call."""
        ...

    def stop(self, session: str) -> None:
        """Announce that a limit of the run ends the conversation, before its question is refused."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class ProgramEnvironment:
    """Conversation with a program, which is its own, in the token ids of its requests."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._line: Line | None = None
        self._question: Question | None = None
        self._session = ""
        self._turn = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Start the program, and return the prefix of its first question as the prompt.

        Raises:
            ValueError: If it ends without a question.
        """
        self._line = self._program.start(row, seed)
        self._question = self._line.wait()
        if self._question is None:
            raise ValueError("expected a program that asks the policy, got one that ended without a question")
        self._session = self._question.session
        return self._question.token_ids

    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Answer the question, and wait for the next one or the end.

        Raises:
            ValueError: If the next prefix does not continue the previous one and the sampled tokens.
        """
        question, line = self._question, self._line
        if question is None or line is None:
            raise RuntimeError("expected a program that waits for an answer, got one that has not begun or has ended")
        _check_end(question, token_ids)
        question.answer(token_ids, finish)
        self._turn += 1
        self._question = line.wait()
        if self._question is None:
            return self._last_step()
        reply = self._reply((*question.token_ids, *token_ids), self._question)
        return TokenStep(token_ids=reply, messages=self._program.messages(self._session))

    def reward(self) -> TokenStep:
        """Stop the program at a limit, and return the result of the conversation so far."""
        self._program.stop(self._session)
        while self._question is not None and self._line is not None:
            self._question.refuse("a limit of the run ends the conversation")
            self._question = self._line.wait()
        return self._last_step()

    def _last_step(self) -> TokenStep:
        result, messages = self._program.result(self._session), self._program.messages(self._session)
        metrics = {f"program_{name}" if name in RESERVED else name: value for name, value in result.metrics.items()}
        return TokenStep(done=True, reward=result.reward, metrics=metrics, messages=messages)

    def close(self) -> None:
        """End the program."""
        if self._line is not None:
            self._line.close()
            self._program.close()

    def _reply(self, said: tuple[int, ...], question: Question) -> tuple[int, ...]:
        """Return the tokens after an answer in the prefix of the next question."""
        if question.session != self._session:
            raise ValueError(
                "expected one agent that asks the policy in a conversation, got a second one: give the other a "
                "separate model and client"
            )
        asked = question.token_ids
        place = next((place for place, pair in enumerate(zip(said, asked, strict=False)) if pair[0] != pair[1]), None)
        if place is None and len(asked) > len(said):
            return asked[len(said) :]
        where = f"other ids from place {place}" if place is not None else f"{len(asked)} ids"
        raise ValueError(
            f"expected question {self._turn + 1} to go on from the {len(said)} ids that were asked and drawn, got "
            f"{where}: the conversation was rendered again or rewritten, which is no single row. Choose a renderer "
            "that appends (renderer=, thinking_retention='all') and a harness that sends back every answer unchanged; "
            "an answer with unfinished reasoning can be the cause too"
        )


def _check_end(question: Question, token_ids: Sequence[int]) -> None:
    """Refuse an answer that continues after a token that ends it for the program."""
    inside = sorted(question.stop_token_ids.intersection(token_ids[:-1]))
    if inside:
        raise ValueError(
            f"expected answers to end at token ids {sorted(question.stop_token_ids)}, as for the renderer, got "
            f"{inside[0]} inside of one: name them in SamplingParams(eos_token_ids=)"
        )
