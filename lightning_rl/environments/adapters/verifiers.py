"""Tasks and harnesses of the package ``verifiers`` (0.4) as environments of a run.

A harness is a program that requests answers from a model. Here it requests them from an
:class:`.completion_server.CompletionServer` in front of the conversation, so engine, sample, turn and
seed are those of the run, and every trained id is a sampled one.
The renderer of the package ``renderers`` writes the tokens between answers.
"""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from lightning_rl.distributed import RunEndError
from lightning_rl.environments.adapters.completion_server import CompletionServer, Line
from lightning_rl.environments.adapters.program import ProgramEnvironment, ProgramResult
from lightning_rl.environments.tools import LOOP
from lightning_rl.processes.errors import CallError
from lightning_rl.samples import Message
from lightning_rl.utils.arguments import check_counts, check_numbers

POLICY = "policy"
"""Name of the trained model for agents."""

TASK = "task"
"""Column with the number of a row's task in the taskset."""

LIMIT = "max_total_tokens"
"""Stop condition of a trace that a limit of the run ends, so that ``trace.is_truncated`` is true."""

GRACE = 10.0  # seconds for a canceled episode to end, and for the shared resources of episodes to close


class BlockedEventLoopError(RunEndError):
    """Task or harness that blocks the event loop of the trainer's process."""


class Verifiers:
    """Factory of environments of verifiers: pass it as ``environment=``.

    Rows name their task by its number in the column ``task``; :meth:`rows` returns them. Other columns are not used:
    task and harness make the prompt. The reward is that of the trace; its metrics, and each of its rewards as
    ``rewards/<name>``, are logged as ``env/...``. One agent uses the policy; others need a separate model and client.

    Args:
        config: ``verifiers.v1.EnvConfig``, or a mapping of that form: ``taskset``, ``agent``.
        tokenizer: Name or folder of the policy's tokenizer, for the renderer.
        renderer: Configuration of the renderer, such as ``{"name": "qwen3", "thinking_retention": "all"}``. It has to
            append: conversations fail if it renders earlier turns differently.
        timeout: Seconds of task and harness per conversation, without those of the policy.
        max_tasks: Maximum number of tasks; None for all of a finite taskset.

    Raises:
        ModuleNotFoundError: Without the package; names the extra.
        ValueError: If taskset or tokenizer do not fit; says what to change.
    """

    replayable = False  # tasks and harnesses are programs, which may reach outside

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
        self._arguments, self._max_tasks = (config, tokenizer, renderer), max_tasks
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
        """Return its arguments, so that each process loads tasks and renderer once."""
        return partial(Verifiers, timeout=self.timeout, max_tasks=self._max_tasks), self._arguments

    def __call__(self) -> ProgramEnvironment:
        """Return an environment for one conversation."""
        return ProgramEnvironment(Episode(self))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each task, as data of a :class:`PromptDataModule`."""
        return [{"prompt": task.data.prompt_text or "-", TASK: number} for number, task in enumerate(self.tasks)]

    def task_of(self, row: Mapping[str, Any]) -> Any:
        """Return the task of a row.

        Raises:
            ValueError: If it names none.
        """
        number = row.get(TASK)
        if type(number) is not int or not 0 <= number < len(self.tasks):
            raise ValueError(
                f"expected column {TASK!r} to be the number of one of {len(self.tasks)} tasks, got {number!r}: "
                "take the rows from rows()"
            )
        return self.tasks[number]


class Service:
    """Completion server and services of an environment, shared by the open conversations of a process."""

    def __init__(self, maker: Verifiers) -> None:
        self._maker = maker
        self._lock = threading.Lock()
        self._users = 0
        self._endpoint: CompletionServer | None = None
        self._end = asyncio.Event()
        self._serving: Future[None] | None = None

    def enter(self) -> CompletionServer:
        """Add a conversation; the first one starts the service."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = self._open()
            self._users += 1
            return self._endpoint

    def leave(self) -> None:
        """Remove a conversation; the last one ends the service.

        Raises:
            TimeoutError: If the event loop is blocked.
        """
        with self._lock:
            self._users -= 1
            if not self._users:
                self._close()

    def _open(self) -> CompletionServer:
        ready: Future[None] = Future()
        self._end = asyncio.Event()
        self._serving = LOOP.start(self._serve(ready, self._end))
        wait((ready, self._serving), self._maker.timeout, return_when=FIRST_COMPLETED)
        if not ready.done():
            self._serving.result(0)  # raises
        return CompletionServer()

    def _close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None and self._serving is not None:
            endpoint.close()
            LOOP.call_soon(self._end.set)
            self._serving.result(GRACE)

    async def _serve(self, ready: "Future[None]", end: asyncio.Event) -> None:
        async with self._maker.env.serving():
            ready.set_result(None)
            await end.wait()


class Episode:
    """Episode of an environment of verifiers, as a :class:`.program.Program`, with the traces of its sessions."""

    def __init__(self, maker: Verifiers) -> None:
        self._maker = maker
        self._line = Line(maker.timeout)
        self._endpoint: CompletionServer | None = None
        self._future: Future[None] | None = None
        self.traces: dict[str, Any] = {}
        self._episode: Any = None
        self._reported = 0  # number of nodes of the trace

    def start(self, row: Mapping[str, Any], seed: int) -> Line:
        """Start the episode in the event loop of this process."""
        del seed  # tasks of verifiers take none; a worker process has its generators seeded with it
        task = self._maker.task_of(row)
        self._endpoint = self._maker.service.enter()
        self._future = LOOP.start(self._run(task, self._endpoint))
        return self._line

    async def _run(self, task: Any, endpoint: CompletionServer) -> None:
        vf, maker = import_verifiers(), self._maker
        headers = {"Authorization": f"Bearer {endpoint.secret}"}
        client = vf.TrainClientConfig(base_url=endpoint.url, headers=headers, **maker.client)
        error: BaseException | None = None
        try:
            context = vf.ModelContext(model=POLICY, client=client)
            self._episode = await maker.env.run_episode(task, context, on_trace=self._connect)
        except asyncio.CancelledError as canceled:
            error = canceled
            raise
        except BaseException as raised:  # noqa: BLE001  an error of task or harness costs only its row
            error = raised
        finally:
            self._line.end(error)

    def _connect(self, trace: Any) -> None:
        if self._endpoint is not None:
            self.traces[trace.id] = trace
            self._endpoint.connect(trace.id, self._line)

    def result(self, session: str) -> ProgramResult:
        """Return reward and metrics of the trace of a session.

        Raises:
            CallError: With the error of task or harness, if there was one.
            ValueError: If a reward was not computed.
        """
        trace = self.traces[session]
        if not (trace.ok and self._maker.env.complete(self._episode)):
            raise _failure(self._episode, trace)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            raise ValueError(f"expected reward {missing[0]} to be computed, got none: {trace.stop_condition}")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        scores = {f"rewards/{name}": reward.score for name, reward in trace.rewards.items()}
        return ProgramResult(reward=trace.reward if trace.rewards else None, metrics={**metrics, **scores})

    def messages(self, session: str) -> Sequence[Message]:
        """Return the messages of the trace since the last call."""
        nodes = self.traces[session].nodes[self._reported :]
        self._reported += len(nodes)
        return [node.message.model_dump(exclude_none=True) for node in nodes]

    def stop(self, session: str) -> None:
        """Mark the trace as truncated, so that a refusal ends it without an error, and it is scored."""
        self.traces[session].stop(LIMIT)

    def close(self) -> None:
        """Cancel the episode, if it has not ended.

        Raises:
            BlockedEventLoopError: If it does not end because its code never awaits.
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
            "loop, which nothing in this process can end: run it in a worker process with Conversations(workers=)"
        )


def import_verifiers() -> Any:
    """Return the package.

    Raises:
        ModuleNotFoundError: If it is missing; names the extra.
    """
    try:
        import verifiers.v1 as vf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"expected the package verifiers, got {error}: pip install 'lightning-rl[verifiers]', in an environment "
            "without openenv, whose requirements it does not share"
        ) from error
    return vf


def load_renderer(client: Any) -> None:
    """Load tokenizer and renderer into the pool of this process, where every client finds them.

    Raises:
        ValueError: If the renderer does not take the tokenizer; says why.
    """
    from verifiers.v1.clients.train import ElasticRendererPool

    pool = ElasticRendererPool(client.renderer_model_name, client.renderer, multiplex=client.multiplex)
    try:
        with ThreadPoolExecutor(1) as thread:  # which ends here, and its loop with it
            thread.submit(lambda: asyncio.run(_load(pool))).result()
    except Exception as error:
        raise ValueError(
            f"expected renderer {client.renderer.name!r} to take tokenizer {client.renderer_model_name!r}, got "
            f"{type(error).__name__}: {error}"
        ) from error


async def _load(pool: Any) -> None:
    await pool.grow()


def _failure(episode: Any, trace: Any) -> CallError:
    """Return the first error of an episode that failed."""
    errors = [*trace.errors, *episode.errors, *itertools.chain.from_iterable(each.errors for each in episode.traces)]
    if not errors:
        return CallError("IncompleteEpisode", f"the environment did not complete: {trace.stop_condition}")
    return CallError(errors[0].type, errors[0].message, errors[0].traceback or "")
