"""Tasks and harnesses of the package ``verifiers`` (0.4) as environments of a run.

A harness is a program that calls a model. Here it calls the policy through the gateway of programs, so engine, sample
and seeds are those of the run, every trained id is a sampled one, and each branch of a trace is one of the sample.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from lightning_rl.environments.environment import RESERVED
from lightning_rl.environments.program import PolicyEndpoint, Program, ProgramResult
from lightning_rl.processes.errors import CallError
from lightning_rl.utils.arguments import check_counts

TASK = "task"
"""Column with the number of a row's task in the taskset."""


class Verifiers(Program):
    """Environments of verifiers: pass it as ``environment=``.

    Rows name their task by its number in the column ``task``; :meth:`rows` returns them. Other columns are not used:
    task and harness make the prompt. The reward is that of the traces that called the policy, which is their mean if
    there are several; their metrics, and each of their rewards as ``rewards/<name>``, are logged as ``env/...``.
    Other agents than the policy need a separate model and client.

    Args:
        config: ``verifiers.v1.EnvConfig``, or a mapping of that form: ``taskset``, ``agent``. Its limits, such as
            ``agent.max_turns``, end a trace that is then scored; a limit of the run ends a sample without a reward.
        timeout: As for :class:`.Program`.
        max_tasks: Maximum number of tasks; None for all of a finite taskset.

    Raises:
        ModuleNotFoundError: Without the package; names the extra.
        ValueError: If the taskset has no tasks, or no end without ``max_tasks``.
    """

    def __init__(self, config: Any, *, timeout: float = 600.0, max_tasks: int | None = None) -> None:
        super().__init__(self.episode, timeout)
        check_counts(1, optional=True, max_tasks=max_tasks)
        self._config, self._max_tasks = config, max_tasks
        vf = import_verifiers()
        self.env = vf.load_environment(vf.resolve_env_config(config))
        if max_tasks is None and not self.env.taskset.bounded:
            raise ValueError("expected max_tasks= for a taskset without an end, got None")
        self.tasks = list(itertools.islice(self.env.taskset, max_tasks))
        if not self.tasks:
            raise ValueError(f"expected a taskset with tasks, got none from {type(self.env.taskset).__name__}")
        self._services: dict[Any, _Service] = {}  # by event loop

    def __reduce__(self) -> Any:
        """Return its arguments, so that each process loads the tasks once."""
        return partial(Verifiers, timeout=self.timeout, max_tasks=self._max_tasks), (self._config,)

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

    async def episode(self, row: Mapping[str, Any], model: PolicyEndpoint) -> ProgramResult:
        """Run the episode of a row's task.

        Raises:
            CallError: With the error of task or harness, if there was one.
            ValueError: If a reward was not computed.
        """
        vf, traces = import_verifiers(), list[Any]()
        client = vf.EvalClientConfig(base_url=f"{model.keyed_url}/v1", api_key_var=NO_KEY)
        async with self._serving():
            context = vf.ModelContext(model=model.model, client=client)
            episode = await self.env.run_episode(self.task_of(row), context, on_trace=traces.append)
        if not self.env.complete(episode) or not all(trace.ok for trace in traces):
            raise _failure(episode, traces)
        return _result_of(traces)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """Keep the shared resources of the environment open, which the first of several episodes opens."""
        service = self._services.setdefault(asyncio.get_running_loop(), _Service(self.env))
        await service.enter()
        try:
            yield
        finally:
            await service.leave()


NO_KEY = "LIGHTNING_RL_POLICY_KEY"  # variable without a value: the key is in the URL


class _Service:
    """Shared resources of an environment in one event loop, opened and closed in one task."""

    def __init__(self, env: Any) -> None:
        self._env, self._users, self._lock = env, 0, asyncio.Lock()
        self._ready, self._end = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def enter(self) -> None:
        """Add an episode."""
        async with self._lock:
            if self._task is None:
                self._ready, self._end = asyncio.Event(), asyncio.Event()
                self._task = asyncio.create_task(self._serve())
                ready = asyncio.create_task(self._ready.wait())
                await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
                if not ready.done():
                    ready.cancel()
                    task, self._task = self._task, None
                    await task  # raises
            self._users += 1

    async def leave(self) -> None:
        """Remove an episode; the last one closes the resources."""
        self._users -= 1
        if not self._users and self._task is not None:
            self._end.set()
            task, self._task = self._task, None
            await task

    async def _serve(self) -> None:
        async with self._env.serving():
            self._ready.set()
            await self._end.wait()


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


def _result_of(traces: list[Any]) -> ProgramResult:
    """Return the mean reward of traces, and their metrics, summed.

    Raises:
        ValueError: If a reward was not computed.
    """
    metrics: dict[str, float] = {}
    for trace in traces:
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing:
            raise ValueError(f"expected reward {missing[0]} to be computed, got none: {trace.stop_condition}")
        values = {name: value for name, value in trace.metrics.items() if value is not None}
        values |= {f"rewards/{name}": reward.score for name, reward in trace.rewards.items()}
        for name, value in values.items():
            name = f"program_{name}" if name in RESERVED else name
            metrics[name] = metrics.get(name, 0.0) + value
    rewards = [trace.reward for trace in traces if trace.rewards]
    return ProgramResult(reward=sum(rewards) / len(rewards) if rewards else None, metrics=metrics)


def _failure(episode: Any, traces: list[Any]) -> CallError:
    """Return the first error of an episode that failed."""
    errors = [*itertools.chain.from_iterable(each.errors for each in (*traces, *episode.traces)), *episode.errors]
    if not errors:
        stops = ", ".join(str(trace.stop_condition) for trace in traces)
        return CallError("IncompleteEpisode", f"the environment did not complete: {stops}")
    return CallError(errors[0].type, errors[0].message, errors[0].traceback or "")
