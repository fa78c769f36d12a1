"""Verifiers: tasks and harnesses written for the package ``verifiers`` (0.4) as environments of a run.

A harness there is a program that asks a model for answers. Here it asks an :class:`.endpoint.Endpoint` in front of the
conversation, so that the engine, the sample, the turn and the seed are the run's, and every id that trains is one that
was drawn, or that stood in a request. The renderer of the package ``renderers`` writes what stands between answers.
"""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning_rl.distributed import RunEndError
from lightning_rl.environments.adapters.completion_server import Endpoint, Line
from lightning_rl.environments.adapters.program import ProgramEnvironment, ProgramResult
from lightning_rl.environments.coroutines import start
from lightning_rl.environments.environment import Message
from lightning_rl.environments.failure import EnvironmentFailureError, Failure
from lightning_rl.utils.arguments import check_counts, check_numbers

POLICY = "policy"
"""What an agent calls the model that trains."""

TASK = "task"
"""The column of a row that says which task of the taskset it is, by its number."""

LIMIT = "max_total_tokens"
"""The stop condition of a trace that a limit of the run ends: ``trace.is_truncated`` is true with it."""

GRACE = 10.0  # seconds that an episode has to end once it is cancelled, and what episodes share to be torn down


class BlockedEventLoopError(RunEndError):
    """Code of a task or a harness holds up the event loop of the trainer's process."""


class Verifiers:
    """Makes an environment of verifiers for each conversation: pass it as ``environment=``.

    Rows name their task by its number in the column ``task``; :meth:`rows` writes them. What a row says else is not
    used: task and harness make the prompt. The reward is that of the trace; its metrics, and each of its rewards as
    ``rewards/<name>``, are logged as ``env/...``. One agent talks to the policy: any other needs a model and a client
    of its own.

    Args:
        config: of the environment, as ``verifiers.v1.EnvConfig`` or a mapping of that shape: ``taskset``, ``agent``.
        tokenizer: name or folder of the policy's tokenizer, for the renderer.
        renderer: the configuration of the renderer, such as ``{"name": "qwen3", "thinking_retention": "all"}``. It has
            to append: one that renders earlier turns anew makes conversations fail, with that reason.
        timeout: seconds that task and harness have for a conversation; the policy's are not counted.
        max_tasks: how many tasks are taken from the taskset; None for all, which an infinite one does not have.

    Raises:
        ModuleNotFoundError: without the package, naming the extra.
        ValueError: if taskset or tokenizer do not fit; the message says what to change.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: str,
        renderer: Mapping[str, Any],
        *,
        timeout: float = 600.0,
        max_tasks: int | None = None,
    ) -> None:
        check_numbers(above=0, finite=True, timeout=timeout)
        check_counts(1, optional=True, max_tasks=max_tasks)
        self._arguments = (config, tokenizer, renderer)
        self._options = {"timeout": timeout, "max_tasks": max_tasks}
        self.timeout = timeout
        vf = import_verifiers()
        self.env = vf.load_environment(vf.resolve_env_config(config))
        if max_tasks is None and not self.env.taskset.bounded:
            raise ValueError("expected max_tasks= for a taskset without an end, got None")
        self.tasks = list(itertools.islice(self.env.taskset, max_tasks))
        if not self.tasks:
            raise ValueError(f"expected a taskset with tasks, got none from {type(self.env.taskset).__name__}")
        self.client = {"renderer": dict(renderer), "renderer_model_name": tokenizer}
        load_renderer(vf.TrainClientConfig(**self.client))
        self.service = Service(self)

    def __reduce__(self) -> Any:
        """Pickled as what it was made of: a process of its own loads tasks and renderer itself, once."""
        return _remake, (self._arguments, self._options)

    def __call__(self) -> ProgramEnvironment:
        """An environment for one conversation."""
        return ProgramEnvironment(Episode(self))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each task, as data of a :class:`PromptDataModule`."""
        return [{"prompt": task.data.prompt_text or "-", TASK: number} for number, task in enumerate(self.tasks)]

    def task_of(self, row: Mapping[str, Any]) -> Any:
        """The task of a row.

        Raises:
            ValueError: if it names none.
        """
        number = row.get(TASK)
        if type(number) is not int or not 0 <= number < len(self.tasks):
            raise ValueError(
                f"expected column {TASK!r} to be the number of one of {len(self.tasks)} tasks, got {number!r}: "
                "take the rows from rows()"
            )
        return self.tasks[number]


class Service:
    """What the conversations of a process share while some are open: the endpoint, and what the environment serves.

    Args:
        maker: of the conversations.
    """

    def __init__(self, maker: Verifiers) -> None:
        self._maker = maker
        self._lock = threading.Lock()
        self._users = 0
        self._endpoint: Endpoint | None = None
        self._end: asyncio.Event | None = None
        self._serving: Future[None] | None = None

    def enter(self) -> Endpoint:
        """Another conversation begins; the first one starts the service."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = self._open()
            self._users += 1
            return self._endpoint

    def leave(self) -> None:
        """A conversation has ended; the last one ends the service.

        Raises:
            TimeoutError: if the event loop is blocked.
        """
        with self._lock:
            self._users -= 1
            if not self._users:
                self._close()

    def _open(self) -> Endpoint:
        ready: Future[asyncio.Event] = Future()
        self._serving = start(self._serve(ready))
        self._serving.add_done_callback(lambda done: _hand_on(done, ready))
        self._end = ready.result(self._maker.timeout)
        return Endpoint()

    def _close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        if self._end is not None and self._serving is not None:
            start(_set(self._end)).result(GRACE)
            self._serving.result(GRACE)

    async def _serve(self, ready: "Future[asyncio.Event]") -> None:
        end = asyncio.Event()
        async with self._maker.env.serving():
            ready.set_result(end)
            await end.wait()


class Episode:
    """One episode of an environment of verifiers, as a :class:`.program.Program`.

    Args:
        maker: of the conversations.

    Attributes:
        traces: what verifiers records of its agents, by session.
    """

    def __init__(self, maker: Verifiers) -> None:
        self._maker = maker
        self._line = Line(maker.timeout)
        self._endpoint: Endpoint | None = None
        self._future: Future[None] | None = None
        self.traces: dict[str, Any] = {}
        self._episode: Any = None
        self._told = 0

    def start(self, row: Mapping[str, Any], seed: int) -> Line:
        """Begins the episode in the loop of this process."""
        del seed  # tasks of verifiers take none; a process of its own has its generators seeded with it
        task = self._maker.task_of(row)
        self._endpoint = self._maker.service.enter()
        self._future = start(self._run(task, self._endpoint))
        return self._line

    async def _run(self, task: Any, endpoint: Endpoint) -> None:
        vf, maker = import_verifiers(), self._maker
        client = vf.TrainClientConfig(
            base_url=endpoint.url, headers={"Authorization": f"Bearer {endpoint.secret}"}, **maker.client
        )
        error: BaseException | None = None
        try:
            context = vf.ModelContext(model=POLICY, client=client)
            self._episode = await maker.env.run_episode(task, context, on_trace=self._connect)
        except asyncio.CancelledError as cancelled:
            error = cancelled
            raise
        except BaseException as raised:  # noqa: BLE001  whatever task and harness raise costs their own row
            error = raised
        finally:
            self._line.end(error)

    def _connect(self, trace: Any) -> None:
        if self._endpoint is not None:
            self.traces[trace.id] = trace
            self._endpoint.connect(trace.id, self._line)

    def result(self, session: str) -> ProgramResult:
        """Reward and metrics of the trace that asked.

        Raises:
            EnvironmentFailureError: with the error of task or harness, if there was one.
            ValueError: if a reward was not computed.
        """
        trace = self.traces[session]
        if not (trace.ok and self._maker.env.complete(self._episode)):
            raise EnvironmentFailureError(_failure(self._episode, trace))
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            raise ValueError(f"expected reward {missing[0]} to be computed, got none: {trace.stop_condition}")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        scores = {f"rewards/{name}": reward.score for name, reward in trace.rewards.items()}
        return ProgramResult(reward=trace.reward if trace.rewards else None, metrics={**metrics, **scores})

    def messages(self, session: str) -> Sequence[Message]:
        """What the trace says beyond what was told before."""
        nodes = self.traces[session].nodes[self._told :]
        self._told += len(nodes)
        return [node.message.model_dump(exclude_none=True) for node in nodes]

    def stop(self, session: str) -> None:
        """Marks the trace as truncated: then a refusal is its end and no error, and it is scored."""
        self.traces[session].stop(LIMIT)

    def close(self) -> None:
        """Cancels the episode, if it has not ended.

        Raises:
            BlockedEventLoopError: if it goes on all the same, because its code never awaits.
        """
        if self._endpoint is None or self._future is None:
            return
        endpoint, self._endpoint = self._endpoint, None
        self._future.cancel()
        ended = self._line.ended.wait(GRACE)
        endpoint.disconnect(self._line)
        with contextlib.suppress(TimeoutError):
            self._maker.service.leave()
            if ended:
                return
        raise BlockedEventLoopError(
            f"expected an episode that ends within {GRACE:g} s of being cancelled, got one whose code blocks the event "
            "loop, which nothing in this process can end: run it in a process of its own with environment_workers="
        )


def import_verifiers() -> Any:
    """The package.

    Raises:
        ModuleNotFoundError: naming the extra.
    """
    try:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"expected the package verifiers, got {error}: pip install 'lightning-rl[verifiers]', in an environment "
            "without openenv, whose requirements it does not share"
        ) from error
    return vf


def load_renderer(client: Any) -> None:
    """Loads tokenizer and renderer into the pool of this process, where every client finds them.

    Raises:
        ValueError: if the renderer does not take the tokenizer, with its reason.
    """
    from verifiers.v1.clients.train import ElasticRendererPool  # pyright: ignore[reportMissingImports]

    pool = ElasticRendererPool(client.renderer_model_name, client.renderer, multiplex=client.multiplex)
    try:
        with ThreadPoolExecutor(1) as thread:  # that is gone after, and its loop with it
            thread.submit(lambda: asyncio.run(_load(pool))).result()
    except Exception as error:
        raise ValueError(
            f"expected renderer {client.renderer.name!r} to take tokenizer {client.renderer_model_name!r}, got "
            f"{type(error).__name__}: {error}"
        ) from error


def _failure(episode: Any, trace: Any) -> Failure:
    """The first error of an episode that failed."""
    errors = [*trace.errors, *episode.errors, *itertools.chain.from_iterable(each.errors for each in episode.traces)]
    if not errors:
        return Failure(kind="IncompleteEpisode", message=f"the environment did not complete: {trace.stop_condition}")
    return Failure(kind=errors[0].type, message=errors[0].message, log=errors[0].traceback or "")


def _remake(arguments: Sequence[Any], options: Mapping[str, Any]) -> Verifiers:
    return Verifiers(*arguments, **options)


def _hand_on(done: "Future[None]", ready: "Future[asyncio.Event]") -> None:
    """Says that what was to be served could not be."""
    error = done.exception()
    if error is not None and not ready.done():
        ready.set_exception(error)


async def _load(pool: Any) -> None:
    await pool.grow()


async def _set(event: asyncio.Event) -> None:
    event.set()
