"""One sample of several turns, as a state machine that any driver can advance.

A driver sends :attr:`Conversation.request` to an engine and passes the completion back. Seeds belong to (sample,
turn), so the order of conversations does not matter. The prefix of a turn is the previous prefix, the sampled ids and
the environment's reply, concatenated, unless the environment rewrites it.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_rl.distributed import RunEndError
from lightning_rl.environments.environment import Environment, TokenEnvironment, TokenStep
from lightning_rl.environments.generators import refuse_draws
from lightning_rl.environments.outcome import DEFAULT, Outcome
from lightning_rl.environments.validation import check_reset, check_step, name_of
from lightning_rl.generation import Completion, Request, turn_seed
from lightning_rl.processes.errors import TIMEOUT, CallError
from lightning_rl.rollout import FinishReason
from lightning_rl.samples import PROMPT, Message, Prompt, Segment, Trajectory
from lightning_rl.utils.mutation_guard import copy_plain

PASSED = (KeyboardInterrupt, SIGTERMException, RunEndError)
"""Errors that pass through an environment's methods without being its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """Limits of conversations.

    Args:
        turns: Maximum number of answers of the policy.
        turn_tokens: Maximum number of sampled tokens in a turn; None for no limit but ``max_new_tokens`` of the first
            request, which holds for the whole conversation.
        length: Maximum number of tokens of prompt and conversation together; None for no limit.
        vocabulary: Number of token ids of the policy, above which a conversation fails; None for any.
    """

    turns: int = 8
    turn_tokens: int | None = None
    length: int | None = None
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Answer of the policy and the environment's reply.

    Args:
        request: Request to the engine.
        completion: Completion of the engine.
        reply: Token ids of the reply; empty after the last answer of a row.
        rewrites: True if the reply is the whole prefix of the next turn.
        reward: Reward of the turn, or None.
    """

    request: Request
    completion: Completion
    reply: tuple[int, ...] = ()
    rewrites: bool = False
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """Row of a rollout: the turns concatenated, where only sampled tokens train.

    One sample is one row: after a rewritten prefix the row continues with all of it.

    Args:
        prompt_ids: Prefix of the first turn.
        turns: Turns in order, at least one unless the environment failed before.
    """

    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...] = ()

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Token ids after the prompt."""
        ids: list[int] = []
        for turn in self.turns:
            ids += turn.completion.token_ids
            ids += turn.reply
        return tuple(ids)

    @property
    def turn_numbers(self) -> tuple[int, ...]:
        """Turn of each response token, from 1; 0 for replies, minus the previous turn for a rewritten prefix."""
        numbers: list[int] = []
        for turn in self.turns:
            number = turn.request.turn + 1
            numbers += [number] * len(turn.completion.token_ids)
            numbers += [-number if turn.rewrites else 0] * len(turn.reply)
        return tuple(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """Conversation that has ended.

    Args:
        row: Its turns.
        finish: Reason for the end.
        outcome: Results of the environment.
        given: Each request with the engine's completion, if stored separately.
    """

    row: ConversationRow
    finish: FinishReason
    outcome: Outcome
    given: tuple[tuple[Request, Completion], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, request: Request, completion: Completion) -> Self:
        """Return the transcript of one answer without an environment."""
        turn = Turn(request=request, completion=completion)
        row = ConversationRow(prompt_ids=request.prefix_ids, turns=(turn,))
        return cls(row=row, finish=completion.finish, outcome=Outcome(answer=completion.token_ids))

    def trajectory(self, prompt: Prompt, request: Request) -> Trajectory:
        """Return the conversation as segments.

        Args:
            prompt: Row of the data.
            request: Request with which the sample began; the environment may have replaced its prefix.
        """
        outcome = self.outcome
        if request.prefix_ids != self.row.prompt_ids:
            request = replace(request, prefix_ids=self.row.prompt_ids)
        made = Trajectory(
            prompt=prompt,
            request=request,
            messages=outcome.messages,
            opening=outcome.opening,
            metrics=outcome.metrics,
            environment=outcome.environment,
            environment_reward=outcome.reward,
            seconds=outcome.seconds,
        )
        parent: int | None = PROMPT
        read: tuple[int, ...] = ()
        for turn in self.row.turns:
            made = made.extend(parent, read, turn.completion)
            *before, answer = made.segments
            if turn.reward is not None:
                made = replace(made, segments=(*before, replace(answer, reward=turn.reward)))
            parent, read = None if turn.rewrites else len(before), turn.reply
        rest = (Segment(token_ids=read, parent=parent),) if read else ()
        return replace(made, segments=(*made.segments, *rest), finish=self.finish)

    @property
    def pairs(self) -> list[tuple[Request, Completion]]:
        """Request and completion of each turn."""
        return list(self.given) or [(turn.request, turn.completion) for turn in self.row.turns]


class Conversation:
    """One sample, turn by turn.

    Args:
        environment: Environment of this conversation alone, closed at its end. None to create it with ``again``.
        first: Request of the first turn for the row's own prompt; its ``max_new_tokens`` limits all turns together.
        limits: Limits of the conversation.
        name: Name of the environment in metrics.
        again: Function that creates the environment, also for a second try with the same seeds after a failure; None
            for no second try.

    Attributes:
        request: Next request; None before :meth:`begin` and after the end.
        transcript: Result; None before the end.
    """

    def __init__(
        self,
        environment: TokenEnvironment | None,
        first: Request,
        limits: ConversationLimits,
        name: str = DEFAULT,
        again: Callable[[], TokenEnvironment] | None = None,
    ) -> None:
        self.request: Request | None = None
        self.transcript: Transcript | None = None
        self._environment, self._first, self._limits, self._name = environment, first, limits, name
        self._make = again
        self._retries, self._timeouts, self._seconds = 0, 0, 0.0
        self._forget()

    def _forget(self) -> None:
        """Clear the state of the conversation."""
        self._row = ConversationRow(prompt_ids=self._first.prefix_ids)
        self._drawn = 0
        self._rewards: list[float] = []
        self._messages: list[Message] = []
        self._metrics: dict[str, float] = {}

    def begin(self, row: Mapping[str, Any], seed: int) -> None:
        """Reset the environment, which may return a prompt."""
        self._start = row, seed
        with self._failures():
            if self._environment is None and self._make is not None:
                with self._clock():
                    self._environment = self._make()
            environment = self._partner
            with self._clock():
                prompt = environment.reset(copy_plain(dict(row)), seed)
            if len(check_reset(environment, prompt, self._limits.vocabulary)) >= (self._limits.length or math.inf):
                self._make = None  # it is as long in a second try
                raise ValueError(
                    f"expected a prompt of fewer tokens than the context of {self._limits.length}, got {len(prompt)} "
                    "by reset"
                )
            if prompt:
                self._row = ConversationRow(prompt_ids=tuple(prompt))
            self._ask(self._row.prompt_ids)

    def receive(self, completion: Completion) -> None:
        """Pass the completion of :attr:`request` to the environment and process its reply."""
        if self.request is None:
            raise RuntimeError(
                f"expected a conversation that waits for an answer, got one without a request in turn {self._turns}"
            )
        turn, self.request = Turn(request=self.request, completion=completion), None
        self._drawn += len(completion.token_ids)
        self._row = replace(self._row, turns=(*self._row.turns, turn))
        with self._failures():
            if completion.finish == FinishReason.ABORT:
                self._end(FinishReason.ABORT)
                return
            with self._clock():
                step = self._partner.step(completion.token_ids, completion.finish)
            self._take(turn, check_step(self._partner, step, self._limits.vocabulary))

    def abandon(self) -> None:
        """End the conversation early."""
        self.request = self._make = None
        if self.transcript is None:
            with self._failures():
                self._end(FinishReason.ABORT)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Treat an error of the environment as the failure of this conversation alone."""
        try:
            yield
        except PASSED:
            raise
        except BaseException as error:  # noqa: BLE001  any error costs only its row, sys.exit too
            self._fail(error)

    @property
    def _partner(self) -> TokenEnvironment:
        if self._environment is None:
            raise RuntimeError("expected a conversation with an environment or a function that creates one, got none")
        return self._environment

    @property
    def _turns(self) -> int:
        return len(self._row.turns)

    @contextmanager
    def _clock(self) -> Iterator[None]:
        """Add the environment's time, and raise if it draws from a global generator."""
        begin = time.perf_counter()
        try:
            with refuse_draws(f"environment {self._name}" if self._environment is None else name_of(self._environment)):
                yield
        finally:
            self._seconds += time.perf_counter() - begin

    def _take(self, turn: Turn, step: TokenStep) -> None:
        """Process the environment's reply."""
        self._add(step)
        self._replace_last(reward=step.reward)
        if step.done:
            self._end(turn.completion.finish)  # LENGTH if the last answer was truncated
        elif self._turns >= self._limits.turns:
            self._stop(FinishReason.TURNS)
        else:
            rewrites = bool(step.rewritten)
            reply = tuple(step.rewritten or step.token_ids)
            prefix = reply if rewrites else (*turn.request.prefix_ids, *turn.completion.token_ids, *reply)
            if self._room(prefix) > 0:  # a reply without room for an answer is left out
                self._replace_last(reply=reply, rewrites=rewrites)
            self._ask(prefix)

    def _add(self, step: TokenStep) -> None:
        """Add messages, metrics and reward of a step."""
        self._messages += [copy_plain(dict(message)) for message in step.messages]
        for name, value in step.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        if step.reward is not None:
            self._rewards.append(float(step.reward))

    def _replace_last(self, **changes: Any) -> None:
        *before, last = self._row.turns
        self._row = replace(self._row, turns=(*before, replace(last, **changes)))

    def _room(self, prefix: Sequence[int]) -> int:
        """Return the number of tokens that the next turn may sample."""
        whole = self._first.sampling.max_new_tokens - self._drawn
        length = math.inf if self._limits.length is None else self._limits.length - len(prefix)
        return int(min(whole, length, self._limits.turn_tokens or math.inf))

    def _ask(self, prefix: tuple[int, ...]) -> None:
        room = self._room(prefix)
        if room <= 0:
            self._stop(FinishReason.LENGTH)
            return
        self.request = replace(
            self._first,
            prefix_ids=prefix,
            turn=self._turns,
            seed=turn_seed(self._first.seed, self._turns),
            sampling=replace(self._first.sampling, max_new_tokens=room),
        )

    def _stop(self, finish: FinishReason) -> None:
        """End the conversation at a limit, with the environment's final reward."""
        reward = getattr(self._environment, "reward", None)
        if callable(reward) and self._row.turns:
            with self._clock():
                final = cast(float | TokenStep | None, reward())
            step = final if isinstance(final, TokenStep) else TokenStep(done=True, reward=final)
            self._add(step)
            if step.reward is not None:
                self._replace_last(reward=(self._row.turns[-1].reward or 0.0) + float(step.reward))
        self._end(finish)

    def _fail(self, error: BaseException) -> None:
        """Start over once; at the second failure end the conversation."""
        failure = CallError.of(error)
        self._messages += getattr(self._environment, "unanswered", ())
        self._timeouts += failure.kind == TIMEOUT
        if self._make is None or self._retries:
            self._end(FinishReason.FAILED, failure)
            return
        with self._clock():
            close_quietly(self._environment)
        self._environment = None
        self._retries += 1
        self._forget()
        self.begin(*self._start)

    def _end(self, finish: FinishReason, failure: CallError | None = None) -> None:
        """Close the environment and store the transcript."""
        with self._clock():
            if failure is None and self._environment is not None:
                self._environment.close()
            else:
                close_quietly(self._environment)
        outcome = Outcome(
            answer=self._row.turns[-1].completion.token_ids if self._row.turns else (),
            environment=self._name,
            messages=tuple(self._messages),
            reward=math.fsum(self._rewards) if self._rewards and failure is None else None,
            metrics={**self._metrics, **self._counts(finish)},
            seconds=self._seconds,
            failure=None if failure is None else str(failure),
            log="" if failure is None else failure.log,
            opening=getattr(self._environment, "opening_length", 0),
        )
        self.transcript = Transcript(row=self._row, finish=finish, outcome=outcome)

    def _counts(self, finish: FinishReason) -> dict[str, float]:
        return {
            "turns": float(self._turns),
            "tokens": float(sum(len(turn.reply) for turn in self._row.turns)),
            "rewritten": float(sum(turn.rewrites for turn in self._row.turns)),
            "failed": float(finish == FinishReason.FAILED),
            "retries": float(self._retries),
            "timeouts": float(self._timeouts),
            "cut_by_turns": float(finish == FinishReason.TURNS),
            "cut_by_tokens": float(finish == FinishReason.LENGTH),
        }


def close_quietly(environment: Environment | TokenEnvironment | None) -> None:
    """Close an environment that failed or was never reset, ignoring its errors."""
    try:
        if environment is not None:
            environment.close()
    except PASSED:
        raise
    except BaseException:  # noqa: BLE001  the first failure is what counts
        pass
