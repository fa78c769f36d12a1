"""One sample of several turns, as a state machine that any driver can advance.

A driver sends :attr:`Conversation.request` to an engine and passes the completion back. Seeds belong to (sample,
turn), so the order of conversations does not matter. The prefix of a turn is the previous prefix, the sampled ids and
the environment's reply, concatenated, unless the environment rewrites it.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_rl.distributed import RunEndError
from lightning_rl.environments.environment import Environment, TokenEnvironment, TokenStep
from lightning_rl.environments.generators import refuse_draws
from lightning_rl.environments.outcome import DEFAULT
from lightning_rl.environments.validation import check_reset, check_step, name_of
from lightning_rl.generation import Completion, Request, turn_seed
from lightning_rl.processes.errors import TIMEOUT, CallError
from lightning_rl.rollout import FinishReason
from lightning_rl.samples import PROMPT, Failure, Media, Message, Trajectory
from lightning_rl.utils.mutation_guard import copy_plain
from lightning_rl.utils.tracing import Span

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


class Conversation:
    """One sample, turn by turn.

    Args:
        environment: Environment of this conversation alone, closed at its end. None to create it with ``again``.
        wanted: Sample without segments. The ``max_new_tokens`` of its request limit all turns together.
        limits: Limits of the conversation.
        name: Name of the environment in metrics.
        again: Function that creates the environment, also for a second try with the same seeds after a failure; None
            for no second try.
        seed: Seed of the environment.
        model: Name of the policy in spans.

    Attributes:
        request: Next request; None before :meth:`begin` and after the end.
        trajectory: Result; None before the end.
        pairs: Requests of this try with the engine's completions, which the driver adds.
    """

    def __init__(
        self,
        environment: TokenEnvironment | None,
        wanted: Trajectory,
        limits: ConversationLimits,
        name: str = DEFAULT,
        again: Callable[[], TokenEnvironment] | None = None,
        *,
        seed: int = 0,
        model: str = "",
    ) -> None:
        self.request: Request | None = None
        self.trajectory: Trajectory | None = None
        self._environment, self._wanted, self._limits, self._name = environment, wanted, limits, name
        self._make, self._seed, self._model = again, seed, model
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
        attributes["gen_ai.conversation.id"] = str(wanted.request.sample_id)
        self._span, self._turn_span = Span(f"invoke_agent {name}", attributes), Span("chat")
        self._row = {**wanted.prompt.columns, "prompt": wanted.prompt.content}
        self._retries, self._timeouts, self._seconds = 0, 0, 0.0
        self._forget()

    def _forget(self) -> None:
        """Clear the state of the conversation."""
        self.pairs: list[tuple[Request, Completion]] = []
        self._made, self._turns, self._drawn = self._wanted, 0, 0
        self._parent: int | None = PROMPT
        self._read: tuple[int, ...] = ()  # tokens after the last answer, which belong to the next turn
        self._media: Media | None = None  # pictures among them
        self._rewards: list[float] = []
        self._messages: list[Message] = []
        self._metrics: dict[str, float] = {}

    def begin(self) -> None:
        """Reset the environment, which may return a prompt."""
        with self._failures():
            if self._environment is None and self._make is not None:
                with self._clock():
                    self._environment = self._make()
            environment = self._partner
            with self._clock():
                prompt = environment.reset(copy_plain(self._row), self._seed)
            if len(check_reset(environment, prompt, self._limits.vocabulary)) >= (self._limits.length or math.inf):
                self._make = None  # it is as long in a second try
                raise ValueError(
                    f"expected a prompt of fewer tokens than the context of {self._limits.length}, got {len(prompt)} "
                    "by reset"
                )
            if prompt:
                media = getattr(environment, "opening_media", None)
                request = replace(self._made.request, prefix_ids=tuple(prompt), media=media)
                self._made = replace(self._made, request=request)
            self._ask(self._made.request.prefix_ids, self._made.request.media)

    def receive(self, completion: Completion) -> None:
        """Pass the completion of :attr:`request` to the environment and process its reply."""
        if self.request is None:
            raise RuntimeError(
                f"expected a conversation that waits for an answer, got one without a request in turn {self._turns}"
            )
        request, self.request = self.request, None
        end_chat(self._turn_span, completion)
        self._made = self._made.extend(self._parent, self._read, completion, self._media)
        self._turns += 1
        self._drawn += len(completion.token_ids)
        with self._failures():
            if completion.finish == FinishReason.ABORT:
                self._end(FinishReason.ABORT)
                return
            with self._clock():
                step = self._partner.step(completion.token_ids, completion.finish)
            self._take(request, completion, check_step(self._partner, step, self._limits.vocabulary))

    def abandon(self) -> None:
        """End the conversation early."""
        self._turn_span.end("abort")
        self.request = self._make = None
        if self.trajectory is None:
            with self._failures():
                self._end(FinishReason.ABORT)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Treat an error of the environment as the failure of this conversation alone."""
        with self._span.current():
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

    @contextmanager
    def _clock(self) -> Iterator[None]:
        """Add the environment's time, and raise if it draws from a global generator."""
        begin = time.perf_counter()
        try:
            with refuse_draws(f"environment {self._name}" if self._environment is None else name_of(self._environment)):
                yield
        finally:
            self._seconds += time.perf_counter() - begin

    def _take(self, request: Request, completion: Completion, step: TokenStep) -> None:
        """Process the environment's reply to a completion."""
        self._add(step)
        if step.done:
            self._end(completion.finish)  # LENGTH if the last answer was truncated
        elif self._turns >= self._limits.turns:
            self._stop(FinishReason.TURNS)
        elif step.rewritten:
            self._parent, self._read, self._media = None, tuple(step.rewritten), step.media
            self._ask(self._read, self._media)
        else:
            self._parent, self._read = len(self._made.segments) - 1, tuple(step.token_ids)
            self._media = step.media
            prefix = (*request.prefix_ids, *completion.token_ids, *self._read)
            self._ask(prefix, self._made.media_of(self._parent, self._read, self._media))

    def _add(self, step: TokenStep) -> None:
        """Add messages, metrics and reward of a step."""
        self._messages += [copy_plain(dict(message)) for message in step.messages]
        for name, value in step.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        if step.reward is not None:
            reward = float(step.reward)
            self._rewards.append(reward)
            *before, last = self._made.segments
            last = replace(last, reward=(last.reward or 0.0) + reward)
            self._made = replace(self._made, segments=(*before, last))

    def _room(self, prefix: Sequence[int]) -> int:
        """Return the number of tokens that the next turn may sample."""
        whole = self._wanted.request.sampling.max_new_tokens - self._drawn
        length = math.inf if self._limits.length is None else self._limits.length - len(prefix)
        return int(min(whole, length, self._limits.turn_tokens or math.inf))

    def _ask(self, prefix: tuple[int, ...], media: Media | None) -> None:
        room = self._room(prefix)
        if room <= 0:
            self._stop(FinishReason.LENGTH)
            return
        first = self._wanted.request
        self.request = replace(
            first,
            prefix_ids=prefix,
            media=media,
            turn=self._turns,
            attempt=self._retries,
            seed=turn_seed(first.seed, self._turns),
            sampling=replace(first.sampling, max_new_tokens=room),
        )
        self._turn_span = chat_span(self.request, self._model)

    def _stop(self, finish: FinishReason) -> None:
        """End the conversation at a limit, with the environment's final reward."""
        reward = getattr(self._environment, "reward", None)
        if callable(reward) and self._turns:
            with self._clock():
                final = cast(float | TokenStep | None, reward())
            self._add(final if isinstance(final, TokenStep) else TokenStep(done=True, reward=final))
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
        Span("retry").start().end(failure.kind)
        self._retries += 1
        self._forget()
        self.begin()

    def _end(self, finish: FinishReason, failure: CallError | None = None) -> None:
        """Close the environment and store the trajectory."""
        with self._clock():
            if failure is None and self._environment is not None:
                self._environment.close()
            else:
                close_quietly(self._environment)
        counts = counts_of(self._made, finish, turns=self._turns, retries=self._retries, timeouts=self._timeouts)
        self.trajectory = replace(
            self._made,
            finish=finish,
            messages=tuple(self._messages),
            opening=getattr(self._environment, "opening_length", 0),
            metrics={**self._metrics, **counts},
            environment=self._name,
            environment_reward=math.fsum(self._rewards) if self._rewards and failure is None else None,
            seconds=self._seconds,
            failure=None if failure is None else Failure((), str(failure), failure.log, failure.kind),
        )
        self._span.end(failure and failure.kind, {"gen_ai.response.finish_reasons": [finish.name.lower()]})


def counts_of(made: Trajectory, finish: FinishReason, *, turns: int, retries: int, timeouts: int) -> dict[str, float]:
    """Return the metrics of every conversation."""
    return {
        "turns": float(turns),
        "tokens": float(sum(len(each.token_ids) for each in made.segments if not each.sampled)),
        "rewritten": float(sum(each.parent is None for each in made.segments)),
        "failed": float(finish == FinishReason.FAILED),
        "retries": float(retries),
        "timeouts": float(timeouts),
        "cut_by_turns": float(finish == FinishReason.TURNS),
        "cut_by_tokens": float(finish == FinishReason.LENGTH),
    }


def chat_span(request: Request, model: str) -> Span:
    """Return the started span of a request to a policy of a name."""
    names = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "lightning_rl"}
    names |= {"gen_ai.request.model": model} if model else {}
    numbers = {"gen_ai.usage.input_tokens": len(request.prefix_ids), "lightning_rl.turn": request.turn + 1}
    conversation = {"gen_ai.conversation.id": str(request.sample_id)}
    return Span(f"chat {model}".rstrip(), {**names, **conversation, **numbers}).start()


def end_chat(span: Span, completion: Completion) -> None:
    """End the span of a request with its completion."""
    used, finish = {"gen_ai.usage.output_tokens": len(completion.token_ids)}, completion.finish.name.lower()
    span.end(finish if finish == "abort" else None, {"gen_ai.response.finish_reasons": [finish], **used})


def close_quietly(environment: Environment | TokenEnvironment | None) -> None:
    """Close an environment that failed or was never reset, ignoring its errors."""
    try:
        if environment is not None:
            environment.close()
    except PASSED:
        raise
    except BaseException:  # noqa: BLE001  the first failure is what counts
        pass
