"""Programs that call the policy as a model API, such as an agent with its own loop, as environments.

A program runs unmodified against the :class:`.Gateway`. Each of its calls has a place in the tree of its sample: it
continues an earlier call, forks from one, or begins a new context; the sample remains one row with one weight.
"""

import asyncio
import inspect
import itertools
import math
import operator
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from lightning_rl.environments.chat_template import Bridge
from lightning_rl.environments.conversation import PASSED, ConversationLimits, chat_span, counts_of, end_chat
from lightning_rl.environments.environment import Action, check_figures
from lightning_rl.environments.gateway.calls import Call, CallAnswer
from lightning_rl.environments.gateway.contexts import Contexts, with_call_ids
from lightning_rl.environments.gateway.gateway import GATEWAY, LOOPBACK, OPPONENT, RefusedCall, answer_id
from lightning_rl.environments.messages import message_of
from lightning_rl.environments.parsing import AnswerParser, before_stop, plain_text, truncated_parser
from lightning_rl.generation import Completion, Request
from lightning_rl.generation.sessions import Session
from lightning_rl.processes.errors import TIMEOUT, CallError
from lightning_rl.samples import POLICY, Failure, FinishReason, Message, Trajectory
from lightning_rl.samples.seeds import call_seed
from lightning_rl.utils.arguments import check_numbers
from lightning_rl.utils.event_loop import EventLoop
from lightning_rl.utils.mutation_guard import copy_plain
from lightning_rl.utils.naming import name_of
from lightning_rl.utils.tracing import Span

PROGRAMS = EventLoop("programs")  # apart from that of requests, because code of users may block it
IGNORED: set[str] = set()  # names of fields of calls of which a warning was given


@dataclass(frozen=True, slots=True)
class PolicyEndpoint:
    """Model API of the policy for one sample: url "http://127.0.0.1:4000", model "policy".

    Clients of OpenAI take ``url + "/v1"`` as base URL, those of Anthropic ``url``.

    Args:
        url: Base URL.
        key: Key, which belongs to the sample.
        model: Name of the model. Calls may have other names, which are roles of the policy, such as "solver".
        opponent: Name under which the policy answers calls that do not train.
    """

    url: str
    key: str
    model: str = POLICY
    opponent: str = OPPONENT

    @property
    def keyed_url(self) -> str:
        """Base URL with the key in it, for clients that send another key or none."""
        return f"{self.url}/{self.key}"

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables from which clients of OpenAI and Anthropic take URL and key."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Rewards of a program's sample, and metrics to log: turn_rewards {"chatcmpl-515-0": 0.5}.

    Args:
        reward: Reward of the last answer, or None.
        turn_rewards: Rewards of answers by the ids of their responses. The sum of all is the reward of the sample.
        metrics: Figures to log.
    """

    reward: float | None = None
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class Program:
    """Program that calls the policy: pass it as ``environment=``, or as one by name.

    Args:
        run: Function of a row and a :class:`PolicyEndpoint`, a coroutine function too. It returns the reward, a
            :class:`ProgramResult`, or None without a reward. It runs in a thread or an event loop of this
            process, or with ``Conversations(workers=)`` in a worker process, which is killed at the timeout.
        timeout: Seconds of the program for a sample, for each of two tries, without those in which it waits for the
            policy.

    Raises:
        ValueError: If the function takes other arguments, or the timeout is not positive.

    Example:
        >>> def agent(row, model):
        ...     client = openai.OpenAI(base_url=model.url + "/v1", api_key=model.key)
        ...     messages = [{"role": "user", "content": row["prompt"]}]
        ...     answer = client.chat.completions.create(model=model.model, messages=messages)
        ...     return float(answer.choices[0].message.content == row["answer"])
        >>> Program(agent, timeout=60).timeout
        60
    """

    replayable = False

    def __init__(self, run: Callable[[Mapping[str, Any], PolicyEndpoint], Any], timeout: float = 600.0) -> None:
        check_numbers(above=0, finite=True, timeout=timeout)
        try:
            inspect.signature(run).bind({}, None)
        except TypeError as error:
            wanted = "a program to be a function of a row and a PolicyEndpoint"
            raise ValueError(f"expected {wanted}, got {name_of(run)}: {error}") from error
        self.run, self.timeout = run, timeout

    def __call__(self) -> "Program":
        """Return itself, as the factory of environments."""
        return self

    def start(self, row: Mapping[str, Any], model: PolicyEndpoint) -> "Future[Any]":
        """Run it for one sample, in an event loop or in a thread; each of its errors is a :class:`.CallError`."""
        if inspect.iscoroutinefunction(self.run):
            return PROGRAMS.start(self._run_async(row, model))
        ended: Future[Any] = Future()

        def call() -> None:
            ended.set_running_or_notify_cancel()
            try:
                ended.set_result(self.complete(row, model))
            except BaseException as error:  # noqa: BLE001  costs only its row, sys.exit and interrupts too
                ended.set_exception(CallError.of(error))

        threading.Thread(target=call, name="program", daemon=True).start()
        return ended

    async def _run_async(self, row: Mapping[str, Any], model: PolicyEndpoint) -> Any:
        try:
            return await self.run(row, model)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  as above
            raise CallError.of(error) from None

    def complete(self, row: Mapping[str, Any], model: PolicyEndpoint) -> Any:
        """Return what it returns for one sample, in this thread."""
        value = self.run(row, model)
        return asyncio.run(value) if inspect.iscoroutine(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Request, completion and reward of one call, and the numbers of the events between which it was open."""

    request: Request
    completion: Completion
    messages: tuple[Message, ...]
    begin: int
    end: int
    reward: float | None = None


def in_order(calls: Sequence[Exchanged]) -> list[Exchanged]:
    """Return calls in the order of their arrival, which does not decide between contexts that were open at once.

    Calls of a context continue each other's ids. If calls of two contexts overlapped, or continue the same ids in the
    same role as attempts do, ids of prefix and answer decide.
    """
    ordered = sorted(calls, key=lambda one: one.begin)
    joined = {id(one): id(one) for one in calls}  # to the first call of each context, and to another context

    def context(one: Exchanged) -> int:
        found = id(one)
        while joined[found] != found:
            found = joined[found]
        return found

    attempts = dict[tuple[tuple[int, ...], str], list[Exchanged]]()
    for one in calls:
        attempts.setdefault((one.request.prefix_ids, one.request.role), []).append(one)
    overlaps, opened = {id(one) for same in attempts.values() if len(same) > 1 for one in same}, list[Exchanged]()
    parents = _parents(calls)
    forks = Counter(map(id, parents.values()))
    for one, parent in ((one, parents[id(one)]) for one in calls if id(one) in parents):
        if forks[id(parent)] == 1 or id(parent) in overlaps:
            joined[context(one)] = context(parent)
    for one, other in ((one, same[0]) for same in attempts.values() for one in same):
        joined[context(one)] = context(other)
    for one in ordered:
        opened = [other for other in opened if other.end > one.begin]
        for other in opened:
            joined[context(one)] = context(other)
        overlaps |= {id(each) for each in (one, *opened) if opened}
        opened.append(one)
    unordered = {context(one) for one in calls if id(one) in overlaps}
    return [
        one
        for group, together in itertools.groupby(ordered, context)
        for one in (sorted(together, key=_identity_of) if group in unordered else together)
    ]


def _parents(calls: Sequence[Exchanged]) -> dict[int, Exchanged]:
    """Return the call that each call continues, by ``id``."""
    path, found = list[tuple[tuple[int, ...], Exchanged]](), dict[int, Exchanged]()
    for ids, one in sorted(((sum(_ids_of(one), ()), one) for one in calls), key=operator.itemgetter(0)):
        while path and ids[: len(path[-1][0])] != path[-1][0]:
            path.pop()
        length = len(one.request.prefix_ids)
        if parent := next((other for before, other in reversed(path) if len(before) <= length), None):
            found[id(one)] = parent
        path.append((ids, one))
    return found


def _ids_of(one: Exchanged) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return one.request.prefix_ids, one.completion.token_ids


def _identity_of(one: Exchanged) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:
    return *_ids_of(one), one.request.role, one.request.seed


def tree_of(wanted: Trajectory, calls: Sequence[Exchanged]) -> tuple[Trajectory, list[tuple[Request, Completion]]]:
    """Return the tree of a sample's calls, whose prompt is the prefix of the first, and the calls with their turns."""
    ordered = in_order(calls)
    made = replace(wanted, request=replace(wanted.request, prefix_ids=ordered[0].request.prefix_ids, media=None))
    for one in ordered:
        made = made.extend(*made.find(one.request.prefix_ids), one.completion)
        *before, answer = made.segments
        made = replace(made, segments=(*before, replace(answer, role=one.request.role, reward=one.reward)))
    return made, [(replace(one.request, turn=turn), one.completion) for turn, one in enumerate(ordered)]


class ProgramConversation:
    """One sample of a program.

    Args:
        program: Program.
        wanted: Sample without segments.
        limits: Limits of the calls. ``max_new_tokens`` of the request limits the sampled tokens of each context.
        bridge: Chat template.
        parser: Function that returns the parser of answers to a call with tools.
        name: Name of the environment in metrics.
        model: Name of the policy in spans.
        start: Function that runs it for one sample; by default in this process.
        address: Address of this machine for the program.

    Attributes:
        trajectory: Result; None before the end.
        pairs: Requests of the last try with their completions.
    """

    def __init__(
        self,
        program: Program,
        wanted: Trajectory,
        limits: ConversationLimits,
        bridge: Bridge,
        parser: Callable[[Sequence[Message]], AnswerParser],
        name: str,
        *,
        model: str = "",
        start: Callable[[Mapping[str, Any], PolicyEndpoint], "Future[Any]"] | None = None,
        address: str = LOOPBACK,
    ) -> None:
        self.trajectory: Trajectory | None = None
        self.pairs: list[tuple[Request, Completion]] = []
        self._program, self._start, self._name = program, start or program.start, name
        self._model, self._address = model, address
        self._wanted, self._limits, self._bridge, self._parser = wanted, limits, bridge, parser
        self._row = {**wanted.prompt.columns, "prompt": wanted.prompt.content}
        self._session: Session | None = None
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
        attributes["gen_ai.conversation.id"] = str(wanted.request.sample_id)
        self._span = Span(f"invoke_agent {name}", attributes)
        self._retries, self._timeouts, self._seconds = 0, 0, 0.0
        self._forget()

    def _forget(self) -> None:
        """Clear the state of a try."""
        self._contexts = Contexts(self._bridge), Contexts(self._bridge)  # of the policy, of the opponent
        self._numbers = [0, 0]  # of their calls
        self._calls, self._events, self._refused, self._aborted = list[Exchanged](), 0, 0, False
        self._repeats: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._limit: FinishReason | None = None  # that refused a call at event _refused, until a later one is answered
        self._open: set[asyncio.Task[Any]] = set()  # calls
        self._broken: Exception | None = None  # error of the engine, or of the parser as CallError
        self._left, self._since = self._program.timeout, time.monotonic()

    async def run(self, session: Session) -> None:
        """Run the program to its end; a second time if it fails."""
        self._session = session
        with self._span.current():
            while self.trajectory is None:
                try:
                    result = await self._try()
                except (*PASSED, asyncio.CancelledError):
                    raise
                except BaseException as error:  # noqa: BLE001  any error costs only its row, sys.exit too
                    self._fail(error)
                else:
                    self._end(result)

    async def _try(self) -> ProgramResult:
        """Run the program once.

        Raises:
            CallError: If it exceeds its time.
            Exception: Error of the program, or of its calls.
        """
        url, key = await GATEWAY.open(self, self._address)
        begin = self._since = time.monotonic()
        task = self._start(copy_plain(self._row), PolicyEndpoint(url, key))
        running = asyncio.wrap_future(task)
        try:
            while not running.done() and self._broken is None:
                if getattr(task, "waits", False):  # for a worker process
                    self._since = time.monotonic()
                left = math.inf if self._open else self._left - (time.monotonic() - self._since)
                if left <= 0:
                    raise self._late()
                await asyncio.wait([running], timeout=min(left, 1.0))
            if self._broken is not None:
                raise self._broken
            if running.cancelled():
                raise CallError("CancelledError", "the program cancelled itself")
            return self._check_ids(result_of(running.result()))
        finally:
            GATEWAY.close(key)
            running.cancel()
            for call in [*self._open]:
                call.cancel()
            self._seconds += time.monotonic() - begin

    def _check_ids(self, result: ProgramResult) -> ProgramResult:
        known = {self._id_of(one.request) for one in self._calls}
        if unknown := [name for name in result.turn_rewards if answer_id(name) not in known]:
            wanted = "turn_rewards by the ids of responses of the policy"
            raise ValueError(f"expected {wanted}, got {unknown[0]!r}: use the id of a response that trains")
        return result

    def _id_of(self, request: Request) -> str:
        return f"{request.sample_id}-{request.turn}"

    def _late(self) -> CallError:
        """Return the error of a program that exceeds its time, with its stack if it blocks the event loop."""
        self._timeouts += 1
        log = PROGRAMS.find_block() if inspect.iscoroutinefunction(self._program.run) else ""
        message = f"the program took longer than {self._program.timeout:g} s for a sample (timeout)"
        return CallError(TIMEOUT, message, log)

    def _fail(self, error: BaseException) -> None:
        """Start over once; at the second failure, or at a limit of the run, end the sample.

        Raises:
            BaseException: Error of the engine, which ends the run.
        """
        if self._broken is not None and not isinstance(self._broken, CallError):
            raise self._broken
        if self._limit is not None and self._calls:
            self._end(ProgramResult())
        elif self._aborted:
            self._end(ProgramResult(), FinishReason.ABORT)
        elif self._retries:
            self._end(ProgramResult(), FinishReason.FAILED, CallError.of(error))
        else:
            self._retries += 1
            self._forget()

    async def answer(self, call: Call) -> CallAnswer:
        """Return the policy's answer to a call; see :class:`.CallHandler`."""
        session = self._session
        if session is None:
            raise RuntimeError("expected a sample that has begun, got a call before")
        begin, opposes = self._event(), call.model == OPPONENT
        prefix, room = self._room(call)
        first = self._wanted.request
        try:
            parse, stop = self._parser(call.tools), (*first.sampling.stop, *call.stop)
            sampling = replace(first.sampling, max_new_tokens=room, stop=stop)
        except ValueError as error:
            raise RefusedCall(400, str(error)) from error
        self._warn(call.ignored)
        number, repeat = sum(self._numbers), self._repeats[call.model, prefix]
        self._numbers[opposes] += 1
        self._repeats[call.model, prefix] += 1
        request = replace(
            first,
            prefix_ids=prefix,
            media=None,
            turn=number,
            attempt=self._retries,
            seed=call_seed(first.seed, prefix, repeat, call.model),
            sampling=sampling,
            role=call.model,
        )
        with self._span.current():
            span = chat_span(request, OPPONENT if opposes else self._model)
        try:
            with self._waiting():
                completion = await session.complete(request)
        except Exception as error:
            self._broken = error
            raise RefusedCall(500, "the engine failed, which ends the run") from error
        end_chat(span, completion)
        answer, drawn = self._action(parse, request, completion, call), completion.token_ids
        messages = (*call.messages, message_of(answer))
        made = Exchanged(request=request, completion=completion, messages=messages, begin=begin, end=self._event())
        self._calls += [] if opposes else [made]
        if self._broken is not None:
            raise RefusedCall(500, f"the answer could not be parsed: {self._broken}")
        if completion.finish == FinishReason.ABORT:
            self._aborted = True
            raise RefusedCall(400, "the engine aborted the answer: the sample ends")
        self._contexts[opposes].add(prefix, answer)
        self._limit = None if begin > self._refused else self._limit
        finish = "length" if completion.finish == FinishReason.LENGTH else "stop"
        return CallAnswer(
            text=answer.text,
            reasoning=answer.reasoning,
            tool_calls=tuple(answer.tool_calls),
            finish="tool_calls" if answer.tool_calls else finish,
            prompt_tokens=len(prefix),
            completion_tokens=len(drawn),
            model=call.model,
            id=self._id_of(request),
            stop=None if answer.tool_calls else before_stop(self._bridge.tokenizer, drawn, call.stop)[1],
        )

    def count(self, call: Call) -> int:
        """Return the number of tokens of a call; see :class:`.CallHandler`."""
        return len(self._prefix(call)[0])

    def _prefix(self, call: Call) -> tuple[tuple[int, ...], int]:
        if any(not isinstance(message.get("content") or "", str) for message in call.messages):
            raise RefusedCall(400, "expected messages of text, got a picture: describe it, or leave it out")
        try:
            return self._contexts[call.model == OPPONENT].prefix(call)
        except ValueError as error:
            raise RefusedCall(400, str(error)) from error

    def _room(self, call: Call) -> tuple[tuple[int, ...], int]:
        """Return the ids that a call continues, and the number of tokens that its answer may have.

        Raises:
            RefusedCall: If a limit of the run leaves none.
        """
        if self._numbers[call.model == OPPONENT] >= self._limits.turns:
            self._limit, self._refused = FinishReason.TURNS, self._events
            raise RefusedCall(400, f"expected at most {self._limits.turns} calls (max_turns), got another one")
        prefix, sampled = self._prefix(call)
        length = math.inf if self._limits.length is None else self._limits.length - len(prefix)
        whole = self._wanted.request.sampling.max_new_tokens - sampled
        room = min(whole, length, self._limits.turn_tokens or math.inf, call.max_tokens or math.inf)
        if room <= 0:
            self._limit, self._refused = FinishReason.LENGTH, self._events
            limit = (
                f"{self._limits.length} tokens" if length <= 0 else f"{whole + sampled} sampled ones (max_new_tokens)"
            )
            raise RefusedCall(
                400,
                f"context_length_exceeded: expected a context below the maximum context length of {limit}, got "
                f"{len(prefix)} tokens, {sampled} of them sampled: shorten the messages",
                "context_length_exceeded",
            )
        return prefix, int(room)

    def _action(self, parse: AnswerParser, request: Request, completion: Completion, call: Call) -> Action:
        """Return the parts of an answer before its stop string; text alone if its tool calls cannot be read."""
        tokenizer, close = self._bridge.tokenizer, self._bridge.close
        asked = before_stop(tokenizer, completion.token_ids, call.stop)[0], request.prefix_ids, call.tools
        answer = plain_text(tokenizer, close)(*asked)
        if completion.finish == FinishReason.LENGTH:
            parse = truncated_parser(parse, tokenizer, close)
        try:
            parsed = parse(*asked)
        except Exception as error:  # noqa: BLE001  a function of a user may raise anything
            self._broken = CallError.of(error)
        else:
            answer = answer if parsed.errors else parsed
        answer = replace(answer, finish=completion.finish, token_ids=completion.token_ids)
        return with_call_ids(answer, request.prefix_ids)

    def _warn(self, ignored: Sequence[str]) -> None:
        new = sorted(set(ignored) - IGNORED)
        if new:
            IGNORED.update(new)
            warnings.warn(
                f"the program of environment {self._name} sets {', '.join(new)}, which has no effect: sampling= of the "
                "module decides how the policy samples",
                stacklevel=2,
            )

    def _event(self) -> int:
        self._events += 1
        return self._events

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Add a call that is open; the time of the program runs only without one."""
        task, now = cast(asyncio.Task[Any], asyncio.current_task()), time.monotonic()
        self._left -= 0.0 if self._open else now - self._since
        self._open.add(task)
        try:
            yield
        finally:
            self._open.discard(task)
            self._since = time.monotonic()

    def abandon(self) -> None:
        """End the sample early."""
        if self.trajectory is None:
            self._end(ProgramResult(), FinishReason.ABORT)

    def _end(self, result: ProgramResult, finish: FinishReason | None = None, failure: CallError | None = None) -> None:
        """Store the trajectory."""
        made, opening, messages = self._wanted, 0, ()
        rewards = {answer_id(name): float(reward) for name, reward in result.turn_rewards.items()}
        self._calls = [replace(one, reward=rewards.get(self._id_of(one.request))) for one in self._calls]
        if self._calls:
            made, self.pairs = tree_of(made, self._calls)
            last = in_order(self._calls)[-1]
            messages = last.messages
            opening = next(place for place, each in enumerate(messages) if each.get("role") == "assistant")
            ends = (finish, self._limit, last.completion.finish)
            finish = next(end for end in ends if end is not None)
        elif finish is None:
            message = "expected a program that calls the policy, got one that ended without a call"
            finish, failure = FinishReason.FAILED, CallError("NoCall", message)
        if result.reward is not None and failure is None:
            *before, end = made.segments
            made = replace(made, segments=(*before, replace(end, reward=(end.reward or 0.0) + float(result.reward))))
        given = [segment.reward for segment in made.segments if segment.reward is not None]
        counts = counts_of(made, finish, turns=len(self._calls), retries=self._retries, timeouts=self._timeouts)
        self.trajectory = replace(
            made,
            finish=finish,
            messages=tuple(copy_plain(dict(message)) for message in messages),
            opening=opening,
            metrics={**result.metrics, **counts},
            environment=self._name,
            environment_reward=sum(given) if given else None,
            seconds=self._seconds,
            failure=None if failure is None else Failure((), str(failure), failure.log, failure.kind),
        )
        self._span.end(failure and failure.kind, {"gen_ai.response.finish_reasons": [finish.name.lower()]})


def result_of(value: Any) -> ProgramResult:
    """Return what a program returned as a result.

    Raises:
        ValueError: If it is no reward and no result, or a figure is not finite.
    """
    result = value if isinstance(value, ProgramResult) else ProgramResult(reward=value)
    check_figures(result.reward, result.metrics, result.turn_rewards)
    return result
