"""Program: an environment whose own loop asks for answers, turned inside out into one that is asked for replies.

A conversation asks its environment what comes after an answer. A program such as an agent's harness does it the other
way round: it runs, and asks for an answer whenever it needs one. So a reset starts the program and waits for its first
question, whose prefix is the prompt; a step answers, and waits for the next, whose prefix has to be the one before with
what was drawn and a reply behind it; when the program ends, the conversation does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_rl.environments.adapters.completion_server import Line, Question
from lightning_rl.environments.environment import COUNTED, Message, TokenStep
from lightning_rl.rollout import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """What a program made of its conversation.

    Args:
        reward: None for nothing to say.
        metrics: figures to log.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Program(Protocol):
    """What asks for answers over a line."""

    def start(self, row: Mapping[str, Any], seed: int) -> Line:
        """Begins elsewhere, and returns at once; the line is told when it has ended, and what with."""
        ...

    def result(self, session: str) -> ProgramResult:
        """What the session that asked was worth, after the end."""
        ...

    def messages(self, session: str) -> Sequence[Message]:
        """What was said since the last call, in words."""
        ...

    def stop(self, session: str) -> None:
        """Tells it that a limit of the run ends the conversation, before its question is refused."""
        ...

    def close(self) -> None:
        """Ends it, whatever it does."""
        ...


class ProgramEnvironment:
    """A conversation with a program, in the token ids that it asked with.

    Args:
        program: of this conversation alone.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._line: Line | None = None
        self._question: Question | None = None
        self._session = ""
        self._turn = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[int]:
        """Starts the program; the prefix of its first question is the prompt.

        Raises:
            ValueError: if it ends without a question.
        """
        self._line = self._program.start(row, seed)
        self._question = self._line.wait()
        if self._question is None:
            raise ValueError("expected a program that asks the policy, got one that ended without a question")
        self._session = self._question.session
        return self._question.token_ids

    def step(self, token_ids: Sequence[int], finish: FinishReason) -> TokenStep:
        """Answers, and waits for the next question or the end.

        Raises:
            ValueError: if the next prefix is not the one before with what was drawn and more.
        """
        asked, line = self._open_question, self._open_line
        self._check_ends(asked, token_ids)
        asked.answer(token_ids, finish)
        self._turn += 1
        self._question = line.wait()
        if self._question is None:
            return self._last_step()
        reply = self._reply((*asked.token_ids, *token_ids), self._question)
        return TokenStep(token_ids=reply, messages=self._program.messages(self._session))

    def reward(self) -> TokenStep:
        """What the conversation is worth as it stands: the program is told to stop, and scores it."""
        line = self._open_line
        self._program.stop(self._session)
        while self._question is not None:
            self._question.refuse("a limit of the run ends the conversation")
            self._question = line.wait()
        return self._last_step()

    def _last_step(self) -> TokenStep:
        result, messages = self._program.result(self._session), self._program.messages(self._session)
        return TokenStep(done=True, reward=result.reward, metrics=_rename(result.metrics), messages=messages)

    def close(self) -> None:
        """Ends the program."""
        if self._line is not None:
            self._line.close()
            self._program.close()

    @property
    def _open_line(self) -> Line:
        if self._line is None:
            raise RuntimeError("expected a reset first, got a step of a program that has not begun")
        return self._line

    @property
    def _open_question(self) -> Question:
        if self._question is None:
            raise RuntimeError("expected a program that waits for an answer, got one that has ended")
        return self._question

    def _check_ends(self, asked: Question, token_ids: Sequence[int]) -> None:
        """Refuses an answer that goes on behind what ends one for the program."""
        inside = sorted(asked.stop_token_ids.intersection(token_ids[:-1]))
        if inside:
            raise ValueError(
                f"expected answers to end at token ids {sorted(asked.stop_token_ids)}, as the renderer takes them to, "
                f"got {inside[0]} in the midst of one: name them in SamplingParams(eos_token_ids=)"
            )

    def _reply(self, said: tuple[int, ...], question: Question) -> tuple[int, ...]:
        """What stands behind an answer in the prefix of the next question."""
        if question.session != self._session:
            raise ValueError(
                "expected one agent that asks the policy in a conversation, got a second one: give the other a model "
                "and a client of its own"
            )
        asked = question.token_ids
        same = next((place for place, pair in enumerate(zip(said, asked, strict=False)) if pair[0] != pair[1]), None)
        if same is None and len(asked) > len(said):
            return asked[len(said) :]
        where = f"other ids from place {same}" if same is not None else f"{len(asked)} ids"
        raise ValueError(
            f"expected question {self._turn + 1} to go on from the {len(said)} ids that were asked and drawn, got "
            f"{where}: it was rendered anew or rewritten, which is no single row. Choose a renderer that appends "
            "(renderer=, thinking_retention='all') and a harness that sends back every answer as it was; an answer "
            "that leaves a thought open can be the cause as well"
        )


def _rename(metrics: Mapping[str, float]) -> dict[str, float]:
    """Figures whose names conversations have themselves are called ``program_...``."""
    return {f"program_{name}" if name in COUNTED else name: value for name, value in metrics.items()}
