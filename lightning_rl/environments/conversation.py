"""Conversation: one sample of several turns as a state machine that any driver can move on.

Whoever drives asks an engine for :attr:`Conversation.request` and gives the completion back; seeds belong to (sample,
turn), so the order in which conversations move on changes nothing. Token in, token out: the prefix of a turn is that of
the turn before, what was drawn, and what the environment said, by concatenation, unless the environment rewrites it.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_rl.distributed import RunEndError
from lightning_rl.edits import copy_plain
from lightning_rl.environments.environment import (
    Environment,
    Message,
    TokenEnvironment,
    TokenStep,
)
from lightning_rl.environments.failure import TIMEOUT, Failure
from lightning_rl.environments.form import check_reset, check_step, name_of
from lightning_rl.environments.generators import refuse_draws
from lightning_rl.environments.outcome import DEFAULT, Outcome
from lightning_rl.generation import Completion, Request, turn_seed
from lightning_rl.rollout import Finish

PASSED = (KeyboardInterrupt, SIGTERMException, RunEndError)
"""What is raised where an environment is called, and is none of its doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where conversations end.

    Args:
        turns: most answers of the policy.
        turn_tokens: most tokens that it draws in a turn; None for no limit but that of the whole conversation, which is
            the ``max_new_tokens`` of the first request.
        length: most tokens of prompt and conversation together, of the engine and the model; None for no limit.
        vocabulary: how many token ids the policy knows, so that a conversation with another one fails; None for any.
    """

    turns: int = 8
    turn_tokens: int | None = None
    length: int | None = None
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An answer of the policy and what came back.

    Args:
        request: what was asked of the engine.
        completion: what it drew.
        reply: what the environment said, in token ids that follow the answer; nothing after the last answer of a row.
        rewrites: whether the reply is the whole prefix of the next turn.
        reward: of the turn; None if the environment said nothing of it.
    """

    request: Request
    completion: Completion
    reply: tuple[int, ...] = ()
    rewrites: bool = False
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """Turns behind each other: a row of a rollout, with holes where the environment speaks.

    One sample is one row, whatever becomes of its context: where a prefix is rewritten, the row goes on with all of it.

    Args:
        prompt_ids: what the first turn continues.
        turns: in their order, at least one unless the environment failed before.
    """

    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...] = ()

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Everything behind the prompt."""
        ids: list[int] = []
        for turn in self.turns:
            ids += turn.completion.token_ids
            ids += turn.reply
        return tuple(ids)

    @property
    def turn_numbers(self) -> tuple[int, ...]:
        """For each token of the response, which turn drew it, from 1; 0 for what the environment said, and minus the
        turn before for a prefix that it has rewritten.
        """
        numbers: list[int] = []
        for turn in self.turns:
            number = turn.request.turn + 1
            numbers += [number] * len(turn.completion.token_ids)
            numbers += [-number if turn.rewrites else 0] * len(turn.reply)
        return tuple(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A conversation that has ended.

    Args:
        row: its turns.
        finish: why it ended.
        outcome: what the environment made of it.
        given: each request with what the engine gave for it, if somebody kept that beside the conversation.
    """

    row: ConversationRow
    finish: Finish
    outcome: Outcome
    given: tuple[tuple[Request, Completion], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, request: Request, completion: Completion) -> Self:
        """An answer that nobody answers: a conversation of one turn, without an environment."""
        turn = Turn(request=request, completion=completion)
        row = ConversationRow(prompt_ids=request.prefix_ids, turns=(turn,))
        return cls(row=row, finish=completion.finish, outcome=Outcome(answer=completion.token_ids))

    @property
    def pairs(self) -> list[tuple[Request, Completion]]:
        """What the engine was asked for and what it drew, turn by turn."""
        return list(self.given) or [(turn.request, turn.completion) for turn in self.row.turns]


class Conversation:
    """One sample, turn by turn.

    Args:
        environment: that nobody else talks to; closed when the conversation ends. None to have ``again`` make it when
            the conversation begins.
        first: the request of the first turn, were there no environment; its ``max_new_tokens`` is what all turns draw
            together.
        limits: where it ends.
        name: of the environment, for metrics.
        again: makes the environment for a second try, from the beginning and with the same seeds, should it fail; None
            for no second try.

    Attributes:
        request: what the engine is to draw next; None before :meth:`begin` and after the end.
        transcript: what came of it; None before the end.
    """

    def __init__(
        self,
        environment: TokenEnvironment | None,
        first: Request,
        limits: Limits,
        name: str = DEFAULT,
        again: Callable[[], TokenEnvironment] | None = None,
    ) -> None:
        self.request: Request | None = None
        self.transcript: Transcript | None = None
        self._environment, self._first, self._limits, self._name = environment, first, limits, name
        self._make, self._again = again, again
        self._retries, self._timeouts, self._seconds = 0, 0, 0.0
        self._forget()

    def _forget(self) -> None:
        """Nothing has been said yet."""
        self._row = ConversationRow(prompt_ids=self._first.prefix_ids)
        self._drawn = 0
        self._rewards: list[float] = []
        self._messages: list[Message] = []
        self._metrics: dict[str, float] = {}

    def begin(self, row: Mapping[str, Any], seed: int) -> None:
        """Resets the environment, which may have a prompt of its own."""
        self._start = row, seed
        try:
            if self._environment is None:
                with self._clock():
                    self._environment = self._open()
            environment = self._environment
            with self._clock():
                said = environment.reset(copy_plain(dict(row)), seed)
            prompt = self._prompt(check_reset(environment, said, self._limits.vocabulary))
        except PASSED:
            raise
        except BaseException as error:  # noqa: BLE001  whatever an environment raises costs its own row, sys.exit too
            self._fail(error)
            return
        if prompt:
            self._row = ConversationRow(prompt_ids=prompt)
        self._ask(self._row.prompt_ids)

    def receive(self, completion: Completion) -> None:
        """Takes what the engine drew for :attr:`request`, and has the environment answer."""
        if self.request is None:
            raise RuntimeError(f"expected a conversation that waits for an answer, got one of turn {self._turns}")
        turn, self.request = Turn(request=self.request, completion=completion), None
        self._drawn += len(completion.token_ids)
        if completion.finish == Finish.ABORT:
            self._add(turn)
            self._end(Finish.ABORT)
            return
        try:
            with self._clock():
                said = self._partner.step(completion.token_ids, completion.finish)
            step = check_step(self._partner, said, self._limits.vocabulary)
        except PASSED:
            raise
        except BaseException as error:  # noqa: BLE001  as above
            self._add(turn)
            self._fail(error)
            return
        self._take(turn, step)

    def abandon(self) -> None:
        """Ends it where it stands, because nobody goes on with it."""
        self.request = self._again = None
        if self.transcript is None:
            self._end(Finish.ABORT)

    def _open(self) -> TokenEnvironment:
        if self._make is None:
            raise RuntimeError("expected an environment or what makes one, got neither")
        return self._make()

    def _prompt(self, said: Sequence[int]) -> tuple[int, ...]:
        """What the environment begins with, if an answer can follow it."""
        length = self._limits.length
        if length is not None and len(said) >= length:
            raise ValueError(
                f"expected a prompt of fewer tokens than the context of {length}, got {len(said)} by reset"
            )
        return tuple(said)

    @property
    def _partner(self) -> TokenEnvironment:
        if self._environment is None:
            raise RuntimeError("expected a conversation that has begun, got one without an environment")
        return self._environment

    @property
    def _turns(self) -> int:
        return len(self._row.turns)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        """Counts the seconds that the environment takes, and looks at the generators that are none of its business."""
        begun = time.perf_counter()
        try:
            with refuse_draws(f"environment {self._name}" if self._environment is None else name_of(self._environment)):
                yield
        finally:
            self._seconds += time.perf_counter() - begun

    def _take(self, turn: Turn, step: TokenStep) -> None:
        """Takes what the environment said."""
        self._note(step)
        turn = replace(turn, reward=step.reward)
        if step.done:
            self._add(turn)
            self._end(turn.completion.finish)  # LENGTH if the last answer was cut off
        elif self._turns + 1 >= self._limits.turns:
            self._add(turn)
            self._stop(Finish.TURNS)
        else:
            rewrites = bool(step.rewritten)
            reply = tuple(step.rewritten if rewrites else step.token_ids)
            prefix = reply if rewrites else (*turn.request.prefix_ids, *turn.completion.token_ids, *reply)
            fits = self._room(prefix) > 0  # what no answer can follow is not said
            self._add(replace(turn, reply=reply, rewrites=rewrites) if fits else turn)
            self._ask(prefix)

    def _note(self, step: TokenStep) -> None:
        """Keeps what is no token."""
        self._messages += [copy_plain(dict(message)) for message in step.messages]
        for name, value in step.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        if step.reward is not None:
            self._rewards.append(float(step.reward))

    def _room(self, prefix: Sequence[int]) -> int:
        """How many tokens the next turn can draw."""
        whole = self._first.sampling.max_new_tokens - self._drawn
        length = math.inf if self._limits.length is None else self._limits.length - len(prefix)
        return int(min(whole, length, self._limits.turn_tokens or math.inf))

    def _ask(self, prefix: tuple[int, ...]) -> None:
        room = self._room(prefix)
        if room <= 0:
            self._stop(Finish.LENGTH)
            return
        sampling = replace(self._first.sampling, max_new_tokens=room)
        self.request = replace(
            self._first,
            prefix_ids=prefix,
            turn=self._turns,
            seed=turn_seed(self._first.seed, self._turns),
            sampling=sampling,
        )

    def _add(self, turn: Turn) -> None:
        self._row = replace(self._row, turns=(*self._row.turns, turn))

    def _stop(self, finish: Finish) -> None:
        """Ends it at a limit: the environment, which would have gone on, says what there is was worth."""
        score = getattr(self._environment, "reward", None)
        if callable(score) and self._row.turns:
            try:
                with self._clock():
                    self._reward(cast(float | TokenStep | None, score()))
            except PASSED:
                raise
            except BaseException as error:  # noqa: BLE001  as above
                self._fail(error)
                return
        self._end(finish)

    def _reward(self, said: float | TokenStep | None) -> None:
        """Adds to what the last turn earned, and to the figures if the environment says more than a number."""
        step = said if isinstance(said, TokenStep) else TokenStep(done=True, reward=said)
        self._note(step)
        if step.reward is None:
            return
        last = self._row.turns[-1]
        last = replace(last, reward=(last.reward or 0.0) + float(step.reward))
        self._row = replace(self._row, turns=(*self._row.turns[:-1], last))

    def _fail(self, error: BaseException) -> None:
        """Begins anew, once; then the conversation has failed."""
        failure = Failure.of(error)
        self._messages += getattr(self._environment, "unanswered", ())
        self._timeouts += failure.kind == TIMEOUT
        if self._again is None:
            self._end(Finish.FAILED, failure)
            return
        with self._clock():
            close_quietly(self._environment)
        self._environment = self._again = None
        self._retries += 1
        self._forget()
        self.begin(*self._start)

    def _end(self, finish: Finish, failure: Failure | None = None) -> None:
        try:
            if self._environment is not None:
                with self._clock():
                    self._environment.close()
        except PASSED:
            raise
        except BaseException as error:  # noqa: BLE001  as above
            if failure is None:
                self._fail(error)
                return
        outcome = Outcome(
            answer=self._row.turns[-1].completion.token_ids if self._row.turns else (),
            environment=self._name,
            messages=tuple(self._messages),
            reward=math.fsum(self._rewards) if self._rewards and failure is None else None,
            metrics={**self._metrics, **self._counts(finish)},
            seconds=self._seconds,
            failure=None if failure is None else str(failure),
            log="" if failure is None else failure.log,
        )
        self.transcript = Transcript(row=self._row, finish=finish, outcome=outcome)

    def _counts(self, finish: Finish) -> dict[str, float]:
        return {
            "turns": float(self._turns),
            "tokens": float(sum(len(turn.reply) for turn in self._row.turns)),
            "rewritten": float(sum(turn.rewrites for turn in self._row.turns)),
            "failed": float(finish == Finish.FAILED),
            "retries": float(self._retries),
            "timeouts": float(self._timeouts),
            "cut_by_turns": float(finish == Finish.TURNS),
            "cut_by_tokens": float(finish == Finish.LENGTH),
        }


def close_quietly(environment: Environment | TokenEnvironment | None) -> None:
    """Closes an environment that nobody goes on with: one that failed, or that was never reset."""
    try:
        if environment is not None:
            environment.close()
    except PASSED:
        raise
    except BaseException:  # noqa: BLE001  what it fails on now is no news
        pass
