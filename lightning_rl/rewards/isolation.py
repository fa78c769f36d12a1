"""Isolation: a reward that runs in processes of its own, which may crash, hang or leak without harm to the run."""

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

from lightning_rl.arguments import check_bools, check_counts, check_numbers
from lightning_rl.naming import in_words, name_of
from lightning_rl.rewards.call import EXTRAS, CallStyle, Failure, Notes, Reward, Rows
from lightning_rl.rewards.executors import ExecutorPool
from lightning_rl.rewards.limit import CLOCK, TimeUpError
from lightning_rl.rewards.pool import Answer, Pool, Task
from lightning_rl.rewards.values import RubbishError, values_of

STARTING = threading.Lock()  # rollouts that are generated beside each other may begin their rewards at the same time


class Submitted(NamedTuple):
    """A call that is being made in other processes: its tasks, each with the rows that it is about."""

    rows: Rows
    tasks: Sequence[tuple[tuple[int, ...], Task]]


class Results(NamedTuple):
    """What came of a call: a value for each row, NaN where there is a failure."""

    values: list[float | None]
    failures: list[Failure]


class Isolated:
    """A reward in a pool of processes. A process that hangs is killed and replaced, one that dies loses its rows alone.

    The processes start with the first call, once, and stay; they have no GPU, and they die with the trainer. What the
    reward keeps from call to call lives in its process: each process has a state of its own. Arguments and results are
    pickled, functions of the main script, lambdas and closures too. For cheap functions the way is longer than the
    work. Calls begin as soon as there are completions, also for rollouts that are generated ahead, unless the reward
    names ``trainer_state``.

    With an executor its workers take the place of the pool, on as many machines as it has. One that is lost costs the
    rows of its task. A call that takes too long fails its rows and is cancelled; a worker that has begun it goes on.

    Args:
        reward: like any other.
        processes: how many work at the same time.
        seconds: what a call may take: with all rows at once a process has so long for it; with ``per_sample`` the
            rollout waits so long for the samples that are not done.
        per_sample: call it with one row at a time, each a task of its own, which may begin while the engine draws the
            other rows; for a reward that does not compare rows.
        sample_seconds: what one sample may take with ``per_sample``.
        max_processes: how many there may be while all of them are stuck in some sample.
        memory: bytes of address space that each process may have; None for no limit.
        environment: variables of the processes, beside those of the trainer; by default no GPU and one thread.
        executor: whose workers make the calls in place of processes of this machine; they can import this library, and
            the executor stays open. ``seconds`` is then what the rollout waits for a call, with or without
            ``per_sample``, and the other limits are the executor's own.

    Raises:
        ValueError: if an option is out of range, or a limit of processes is given beside an executor.
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
                f"expected reward to be a function, got {reward!r:.200}: a weight goes beside it, as in "
                '{"name": (Isolated(function), 0.5)}'
            )
        known = isinstance(environment, Mapping | None)
        if not known or not all(isinstance(text, str) for pair in (environment or {}).items() for text in pair):
            raise ValueError(f'expected environment to map names to texts, as {{"HOME": "/tmp"}}, got {environment!r}')
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
        """Whether a call may begin before the trainer is there: the reward does not name ``trainer_state``."""
        return "trainer_state" not in self.__signature__.parameters

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Like any other reward, for a call outside of a run; NaN for rows that it fails on."""
        ids = columns.pop("completion_ids", [()] * len(prompts))
        columns = {name: values for name, values in columns.items() if name not in EXTRAS}
        rows = Rows(prompts=prompts, completions=completions, completion_ids=ids, columns=columns)
        style = CallStyle.of(self.__name__, self.reward, list(columns))
        return self.collect(self.submit(rows, style), Notes(len(rows))).values

    def __getstate__(self) -> dict[str, Any]:
        """Without the processes, which belong to this one."""
        return {**vars(self), "_pool": None}

    def submit(self, rows: Rows, style: CallStyle, state: TrainerState | None = None) -> Submitted:
        """Begins a call and returns at once."""
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
        """Waits for a call.

        Args:
            submitted: by :meth:`submit`.
            notes: of the whole call, which what every task noted is added to.
        """
        cause = ""
        try:
            CLOCK.run(lambda: self._wait(submitted), None)
        except TimeUpError as error:
            cause = str(error)
        late_tasks = [task for _, task in submitted.tasks if not task.answer.done()]
        if late_tasks and self._pool is not None:
            self._pool.abandon(late_tasks)  # or the next call would wait behind them
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
        """Ends the processes; the next call starts others."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def pids(self) -> list[int]:
        """Of the processes that watch over those that run."""
        return [] if self._pool is None else self._pool.pids()

    def _start(self) -> Pool | ExecutorPool:
        if self.executor is not None:
            rank_zero_info(f"reward {self.__name__} is called by workers of {type(self.executor).__name__}")
            self._pool = ExecutorPool(cloudpickle.dumps(self.reward), self.executor)
            return self._pool
        rank_zero_info(f"reward {self.__name__} runs in {self.processes} processes of its own")
        self._pool = Pool(
            cloudpickle.dumps(self.reward),
            processes=self.processes,
            max_processes=self.max_processes,
            memory=self.memory,
            environment=self.environment,
        )
        return self._pool

    def _wait(self, submitted: Submitted) -> None:
        """Waits until all is done, and adds processes while those there are do nothing but hang."""
        patience, end = self.sample_seconds / 10, time.monotonic() + self.seconds
        pending = {task.answer for _, task in submitted.tasks}
        bounded = self.per_sample or self.executor is not None
        while pending and (not bounded or time.monotonic() < end):
            pending = wait(pending, min(patience, 0.2)).not_done
            if self.per_sample and self._pool is not None:
                self._pool.grow(patience)


def _check_executor(executor: Executor, **limits: Any) -> None:
    """Refuses what is no executor, and limits that it could not keep."""
    if not isinstance(executor, Executor):
        raise ValueError(
            f"expected executor to be a concurrent.futures.Executor, got {executor!r:.200}: of a Dask client pass "
            "client.get_executor()"
        )
    defaults = inspect.signature(Isolated).parameters
    if beside := [name for name, value in limits.items() if value != defaults[name].default]:
        raise ValueError(
            f"expected no {in_words(beside)} beside executor=, whose workers have their own, got {beside[0]}="
            f"{limits[beside[0]]!r:.99}: leave out either"
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
    """Adds what became of one task."""
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
        kind = "returned something else than rewards: " if isinstance(error, RubbishError) else ""
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
    """One failure for each cause, with all its rows."""
    merged: dict[str, Failure] = {}
    for failure in failures:
        known = merged.get(failure.cause)
        merged[failure.cause] = failure if known is None else known._replace(rows=(*known.rows, *failure.rows))
    return list(merged.values())
