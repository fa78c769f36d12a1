"""Rewards in separate processes, which may crash, hang or leak without harm to the run."""

import inspect
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, wait
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
from lightning.pytorch.utilities import rank_zero_info
from transformers import TrainerState

from lightning_rl.rewards.executors import ExecutorPool
from lightning_rl.rewards.process_pool import Answer, Pool, Task
from lightning_rl.rewards.reward_call import EXTRAS, CallStyle, Failure, Notes, Reward, Rows
from lightning_rl.rewards.timeouts import CLOCK, RewardTimeoutError
from lightning_rl.rewards.values import InvalidRewardError, values_of
from lightning_rl.utils.arguments import check_bools, check_counts, check_numbers
from lightning_rl.utils.naming import in_words, name_of

STARTING = threading.Lock()  # concurrent rollouts may start their rewards at the same time


class Submitted(NamedTuple):
    """Tasks of a running call, each with its rows."""

    rows: Rows
    tasks: Sequence[tuple[tuple[int, ...], Task]]


class Results(NamedTuple):
    """Result of a call: one value per row (NaN for a failure) and the failures."""

    values: list[float | None]
    failures: list[Failure]


class SubprocessReward:
    """Reward in a pool of processes; a hanging process is killed and replaced, a crash fails only its rows.

    The processes start at the first call and stay until the trainer exits; they see no GPU. Each process has its own
    state of the reward. Arguments and results are pickled by cloudpickle, so lambdas, closures and functions of the
    main script work. For cheap functions the transfer takes longer than the call. Calls start as soon as there are
    completions, also for prefetched rollouts, unless the reward takes ``trainer_state``.

    With an executor its workers replace the pool, on as many machines as it has. A lost worker fails the rows of its
    task. A call that times out fails its rows and is cancelled; a worker that has started it continues.

    Args:
        reward: Any reward function.
        processes: Number of processes that work at the same time.
        seconds: Time limit of a call on all rows; with ``per_sample``, time that the rollout waits for unfinished
            samples.
        per_sample: Call the reward on one row at a time, each a separate task, which may start before other rows are
            generated; for a reward that does not compare rows.
        sample_seconds: Time limit of one sample with ``per_sample``.
        max_processes: Maximum number of processes while all of them hang.
        memory: Address space of each process in bytes; None for no limit.
        environment: Environment variables of the processes, added to those of the trainer; by default no GPU and one
            thread.
        executor: Executor whose workers make the calls instead of local processes. They must be able to import this
            library; the executor stays open. ``seconds`` then limits the wait for a call, with or without
            ``per_sample``; the executor sets the other limits.

    Raises:
        ValueError: If an option is out of range, or a process limit is given with an executor.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        processes: int = 2,
        seconds: float = 60.0,
        per_sample: bool = False,
        sample_seconds: float = 10.0,
        max_processes: int = 32,
        memory: int | None = None,
        environment: Mapping[str, str] | None = None,
        executor: Executor | None = None,
    ) -> None:
        if not callable(reward) or isinstance(reward, type):
            raise ValueError(
                f"expected reward to be a function, got {reward!r:.200}: put a weight beside SubprocessReward, as in "
                '{"name": (SubprocessReward(function), 0.5)}'
            )
        known = isinstance(environment, Mapping | None)
        if not known or not all(isinstance(text, str) for pair in (environment or {}).items() for text in pair):
            raise ValueError(
                f'expected environment to map names to strings, such as {{"HOME": "/tmp"}}, got {environment!r}'
            )
        check_counts(1, processes=processes, max_processes=max_processes)
        check_counts(1, optional=True, memory=memory)
        check_numbers(above=0, finite=True, seconds=seconds, sample_seconds=sample_seconds)
        check_bools(per_sample=per_sample)
        if executor is not None:
            limits = {"processes": processes, "sample_seconds": sample_seconds, "max_processes": max_processes}
            _check_executor(executor, **limits, memory=memory, environment=environment)
        if max_processes < processes:
            raise ValueError(f"expected max_processes of at least processes={processes}, got {max_processes}")
        self.reward, self.processes, self.seconds = reward, processes, seconds
        self.per_sample, self.sample_seconds, self.max_processes = per_sample, sample_seconds, max_processes
        self.memory, self.environment = memory, dict(environment or {})
        self.executor = executor
        self.__name__ = name_of(reward)
        self.__signature__ = inspect.signature(reward)
        self._pool: Pool | ExecutorPool | None = None

    @property
    def starts_early(self) -> bool:
        """True if a call may start before the trainer state exists: the reward does not take ``trainer_state``."""
        return "trainer_state" not in self.__signature__.parameters

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Call the reward outside of a run and return its values; NaN for failed rows."""
        ids = columns.pop("completion_ids", [()] * len(prompts))
        columns = {name: values for name, values in columns.items() if name not in EXTRAS}
        rows = Rows(prompts=prompts, completions=completions, completion_ids=ids, columns=columns)
        style = CallStyle.of(self.__name__, self.reward, list(columns))
        return self.collect(self.submit(rows, style), Notes(len(rows))).values

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the processes, which belong to this process."""
        return {**vars(self), "_pool": None}

    def submit(self, rows: Rows, style: CallStyle, state: TrainerState | None = None) -> Submitted:
        """Start a call and return at once."""
        parts = [(row,) for row in range(len(rows))] if self.per_sample else [tuple(range(len(rows)))]
        seconds = self.sample_seconds if self.per_sample else self.seconds
        state = None if self.starts_early else state
        tasks = [(part, Task(_payload(rows.select(part), style, state), seconds)) for part in parts]
        with STARTING:
            pool = self._pool or self._start()
        for _, task in tasks:
            pool.submit(task)
        return Submitted(rows, tasks)

    def collect(self, submitted: Submitted, notes: Notes) -> Results:
        """Wait for a call.

        Args:
            submitted: Result of :meth:`submit`.
            notes: Notes of the call; those of each task are added to it.
        """
        cause = ""
        try:
            CLOCK.run(lambda: self._wait(submitted), None)
        except RewardTimeoutError as error:
            cause = str(error)
        late_tasks = [task for _, task in submitted.tasks if not task.answer.done()]
        if late_tasks and self._pool is not None:
            self._pool.abandon(late_tasks)  # else the next call queues behind them
        results = Results([math.nan] * notes.number, [])
        together = " for all samples together" if self.per_sample else ""
        late = Answer("lost", cause or f"took longer than {self.seconds:g} s{together}")
        for part, task in submitted.tasks:
            lost = task in late_tasks or task.answer.cancelled()
            answer = late if lost else task.answer.result()
            _add(results, part, answer, notes)
        results.failures[:] = _merge(results.failures)
        return results

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def pids(self) -> list[int]:
        """Process ids of the guards of the running processes."""
        return [] if self._pool is None else self._pool.pids()

    def _start(self) -> Pool | ExecutorPool:
        if self.executor is not None:
            rank_zero_info(f"reward {self.__name__} is called by workers of {type(self.executor).__name__}")
            self._pool = ExecutorPool(cloudpickle.dumps(self.reward), self.executor)
            return self._pool
        rank_zero_info(f"reward {self.__name__} runs in {self.processes} separate processes")
        self._pool = Pool(
            cloudpickle.dumps(self.reward),
            processes=self.processes,
            max_processes=self.max_processes,
            memory=self.memory,
            environment=self.environment,
        )
        return self._pool

    def _wait(self, submitted: Submitted) -> None:
        """Wait until all tasks are done, and add processes while all existing ones hang."""
        patience, end = self.sample_seconds / 10, time.monotonic() + self.seconds
        pending = {task.answer for _, task in submitted.tasks}
        bounded = self.per_sample or self.executor is not None
        while pending and (not bounded or time.monotonic() < end):
            pending = wait(pending, min(patience, 0.2)).not_done
            if self.per_sample and self._pool is not None:
                self._pool.grow(patience)


def _check_executor(executor: Executor, **limits: Any) -> None:
    """Check the type of the executor, and that no process limit is given with it."""
    if not isinstance(executor, Executor):
        raise ValueError(
            f"expected executor to be a concurrent.futures.Executor, got {executor!r:.200}: for a Dask client pass "
            "client.get_executor()"
        )
    defaults = inspect.signature(SubprocessReward).parameters
    if beside := [name for name, value in limits.items() if value != defaults[name].default]:
        raise ValueError(
            f"expected no {in_words(beside)} with executor=, whose workers have their own limits, got {beside[0]}="
            f"{limits[beside[0]]!r:.99}: leave out one"
        )


def _payload(rows: Rows, style: CallStyle, state: TrainerState | None) -> bytes:
    arguments: tuple[Any, ...] = (rows.prompts, rows.completions)
    keywords: dict[str, Any] = {"completion_ids": rows.completion_ids, **rows.columns}
    if style.by_keyword:
        arguments, keywords = (), {"prompts": rows.prompts, "completions": rows.completions, **keywords}
    if "trainer_state" in style.extras and state is not None:
        keywords["trainer_state"] = SimpleNamespace(
            global_step=state.global_step, max_steps=state.max_steps, epoch=state.epoch
        )
    return cloudpickle.dumps((arguments, keywords, sorted(style.extras), len(rows)))


def _add(results: Results, part: tuple[int, ...], answer: Answer, notes: Notes) -> None:
    """Add the result of one task."""
    if answer.kind != "returned":
        cause = f"raised {answer.value:.500}" if answer.kind == "raised" else answer.value
        results.failures.append(Failure(part, cause, answer.detail))
        return
    try:
        values = values_of(answer.value, len(part))
        for column, items in answer.detail:
            _add_extra(notes, column, part, items)
        for name, number in answer.metrics:
            notes.log_metric(name, number)
    except ValueError as error:
        kind = "returned invalid rewards: " if isinstance(error, InvalidRewardError) else ""
        results.failures.append(Failure(part, f"{kind}{error}"))
        return
    for row, value in zip(part, values, strict=True):
        results.values[row] = value


def _add_extra(notes: Notes, column: str, part: tuple[int, ...], items: Sequence[Any]) -> None:
    if len(items) != len(part):
        raise ValueError(f"expected {len(part)} values in log_extra({column!r}, ...), got {len(items)}")
    values = notes.extras.get(column) or [None] * notes.number
    for row, item in zip(part, items, strict=True):
        values[row] = item
    notes.log_extra(column, values)


def _merge(failures: Sequence[Failure]) -> list[Failure]:
    """Return one failure per cause, with all its rows."""
    merged: dict[str, Failure] = {}
    for failure in failures:
        known = merged.get(failure.cause)
        merged[failure.cause] = failure if known is None else known._replace(rows=(*known.rows, *failure.rows))
    return list(merged.values())
